"""The ``Engine`` protocol: token ids in; token ids, behaviour log-probabilities and weight versions out.

An engine serves one policy. The protocol is independent of text, workflows, gRPC and the source of weights.

Weight updates never drop running generations: ``update`` takes effect between two decoding steps, tokens
keep the version that computed them, and by default the KV cache of live requests is recomputed, so that every
log-probability equals a plain forward pass of the version named on its segment.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from services.common.errors import ConfigError, InvalidRequestError, ModelMismatchError, PromptTooLongError
from services.common.kept_tokens import KeptRow, pack
from services.common.records import Logprobs, Sampling, Segment, TokenIds
from services.common.weights.codec import ChunkChange

# --- The argument of ``Engine.update``: whole tensors, or only their changed elements; with a check against a model's
# shapes.


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """The change from one version to another. Tensors have their Hugging Face names; tied weights appear once.

    ``complete``: ``whole`` names every tensor of the model. Otherwise tensors that are not named keep their values.
    """

    version: int
    whole: Mapping[str, Any] = field(default_factory=dict)  # host tensors, in any floating type
    changes: Mapping[str, Sequence[ChunkChange]] = field(default_factory=dict)  # bits of the type ``dtype``
    dtype: str = ""  # of the changes, in torch's notation
    complete: bool = True

    @classmethod
    def full(cls, weights: Mapping[str, Any], version: int) -> WeightUpdate:
        """Every tensor, whole."""
        return cls(version=version, whole=weights)


def _check_weights_match(expected: Mapping[str, Any], found: Mapping[str, Any], where: str = "the update") -> None:
    """``ModelMismatchError`` unless ``found`` has exactly the names of ``expected``, each with the same shape."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    reshaped = [
        f"{name} has shape {tuple(found[name].shape)}, the model {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and tuple(found[name].shape) != tuple(tensor.shape)
    ]
    complaints = [
        f"{label}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("other shape", reshaped))
        if names
    ]
    if complaints:
        raise ModelMismatchError(f"weights of {where} do not match the model: {'; '.join(complaints)}")


def check_update(update: WeightUpdate, weights: Mapping[str, Any]) -> None:
    """``weights`` has the model's shapes by name. ``ModelMismatchError`` when the update is for another model."""
    if update.complete:
        _check_weights_match(weights, update.whole)
        return
    unknown = [name for name in (*update.whole, *update.changes) if name not in weights]
    if unknown:
        raise ModelMismatchError(f"weights of the update do not match the model: unexpected: {', '.join(unknown[:4])}")
    _check_weights_match({name: weights[name] for name in update.whole}, update.whole)
    for name, changes in update.changes.items():
        size = math.prod(weights[name].shape)
        for change in changes:
            last = len(change.values) if change.positions is None else int(change.positions[-1]) + 1
            if change.start + last > size:
                raise ModelMismatchError(
                    f"weights of the update do not match the model: {name} has {size} elements, "
                    f"the update changes element {change.start + last - 1}"
                )


Watch = Callable[[int], bool]  # called with each sampled token; True ends the generation with that token


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop token was sampled: the last token of the result
    LENGTH = "length"  # the end of max_new_tokens, the context, or forced_ids


class KvPolicy(enum.StrEnum):
    """Treatment of the KV cache of live requests when the weights change."""

    RECOMPUTE = "recompute"  # exact: later tokens equal a forward pass of the new weights
    KEEP = "keep"  # cheaper: later segments are marked ``mixed_cache``


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """``sampling.max_new_tokens`` is the budget over interruptions and weight swaps alike."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    forced_ids: tuple[int, ...] | None = None
    """Tokens to emit instead of sampled ones, one per decoding step. Required by the replay engine; others refuse them."""
    record_kept: bool = True
    """Whether segments list the drawable tokens if the sampling is truncated. Off in evaluation."""
    watch: Watch | None = field(default=None, compare=False)
    """Called in the engine's thread, so the call must be quick. An engine may never call ``watch``: the caller then checks
    the finished generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The sampled tokens. ``segments`` are policy segments, one per run of tokens of one weight version."""

    segments: tuple[Segment, ...]
    finish_reason: FinishReason

    @property
    def token_ids(self) -> list[int]:
        return [int(t) for s in self.segments for t in s.token_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Tokens to score that this engine did not sample: those at ``positions``, each given all tokens before."""

    request_id: str
    token_ids: TokenIds  # [num_tokens] of the whole sequence
    positions: npt.NDArray[np.int64]  # [num_scored], ascending, from 1 on: no token precedes the first
    temperatures: npt.NDArray[np.float32]  # [num_scored] that they were drawn at, above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUse:
    """A paged KV cache: blocks now, and a count since start."""

    blocks: int  # that requests can hold
    used: int  # by running requests and by cached prefixes
    shared: int  # used by several sequences at once
    evicted: int  # cached prefixes that were given up for their memory


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    ok: bool
    detail: str
    running: int  # requests in slots
    waiting: int  # requests queued
    generated_tokens: int  # since start
    kv: KvUse | None = None  # None where the cache is not paged, or is the business of another process


Mark = tuple[int, int, bool]  # first token, weight version, and whether a cache of older weights was read


def segments_by(marks: Sequence[Mark], tokens: Any, logprobs: Any, kept: Sequence[KeptRow] = ()) -> tuple[Segment, ...]:
    """The policy segments of generated tokens: each mark's up to the next one. ``kept`` may lack the last rows."""
    ends = [*(start for start, _, _ in marks[1:]), len(tokens)]
    return tuple(
        Segment.policy(tokens[start:end], logprobs[start:end], version, mixed, pack(kept[start:end], end - start))
        for (start, version, mixed), end in zip(marks, ends, strict=True)
        if end > start
    )


class Engine(Protocol):
    """Raises ``PromptTooLongError`` when a prompt does not fit, ``InfrastructureError`` when the engine died."""

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one continuation. Cancelling the awaiting task ends the request."""
        ...

    async def score(self, request: ScoreRequest) -> Logprobs:
        """Log-probabilities [num_scored] of given tokens over the whole vocabulary, each at its temperature, under the weights
        held now. ``ConfigError`` where the engine cannot; cancelling the awaiting task withdraws the request."""
        ...

    async def update(self, update: WeightUpdate) -> float:
        """Switch to another version in place; returns the seconds without decoding.

        Atomic between two decoding steps: no token is ever computed from a mixture. ``ModelMismatchError`` for a
        missing name or another shape, before anything changes. The caller may change the update's arrays after the return.
        """
        ...

    @property
    def version(self) -> int: ...

    def health(self) -> EngineHealth: ...

    async def stop(self) -> None: ...


@runtime_checkable
class SharesDevice(Protocol):
    """An engine that frees its memory while another process needs the device."""

    async def release(self) -> None:
        """Stop between two decoding steps, and free the memory of weights and caches. Requests stay where they are, and new
        ones wait; ``update`` only changes the version, under which ``restore`` goes on. Harmless when released already."""
        ...

    async def restore(self, update: WeightUpdate) -> None:
        """Take the memory again, with the weights of a complete update, and go on: the caches of running requests are computed
        again. Raises like ``update``."""
        ...


def sharing(engine: Engine) -> SharesDevice:
    """The engine as one that frees its memory. Raises ``ConfigError`` for one that does not."""
    if isinstance(engine, SharesDevice):
        return engine
    raise ConfigError(
        f"engine {type(engine).__name__} does not free its memory between turns: write placement: apart, or engine: torch"
    )


# --- Validates generation requests against an engine's context and vocabulary, before the engine takes them.


def check_request(
    request: GenerationRequest, *, context_length: int, vocab_size: int | None = None, forced: bool = False
) -> None:
    """``PromptTooLongError`` or ``InvalidRequestError`` with the value that is wrong; no vocabulary, no id check.

    ``forced`` says that the engine takes its tokens from the request rather than from a distribution.
    """
    num_prompt = len(request.prompt_ids)
    sampling = request.sampling
    if num_prompt >= context_length:
        raise PromptTooLongError(
            f"prompt has {num_prompt} tokens, the context only {context_length} and at least one must be new",
            prompt_tokens=str(num_prompt),
            context_tokens=str(context_length),
        )
    problem = ""
    if not num_prompt:
        problem = "the prompt is empty"
    elif vocab_size is not None and not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
        problem = f"the prompt has token ids outside 0…{vocab_size - 1}"
    elif vocab_size is not None and any(not 0 <= token < vocab_size for token in request.stop_token_ids):
        problem = f"stop tokens {request.stop_token_ids} reach outside 0…{vocab_size - 1}"
    elif sampling.max_new_tokens < 1:
        problem = f"max_new_tokens is {sampling.max_new_tokens}; must be at least 1"
    elif sampling.min_new_tokens < 0:
        problem = f"min_new_tokens is {sampling.min_new_tokens}; must be 0 or more"
    elif not sampling.temperature >= 0:  # written so that NaN is refused too
        problem = f"temperature is {sampling.temperature}; must be 0 (greedy) or more"
    elif not 0 < sampling.top_p <= 1:
        problem = f"top_p is {sampling.top_p}; must be above 0 and at most 1"
    elif sampling.top_k < 0:
        problem = f"top_k is {sampling.top_k}; must be 0 (off) or more"
    elif not 0 <= sampling.min_p < 1:
        problem = f"min_p is {sampling.min_p}; must be 0 (off) or more, and below 1"
    elif forced:
        problem = _problem_with_forced(request, vocab_size)
    elif request.forced_ids is not None:
        problem = (
            "forced_ids names the tokens to emit, and this engine samples; write the replay engine (engine: forced)"
        )
    if problem:
        raise InvalidRequestError(f"request {request.request_id!r}: {problem}")


def check_score_request(request: ScoreRequest, *, context_length: int, vocab_size: int | None = None) -> None:
    """``PromptTooLongError`` or ``InvalidRequestError`` with the value that is wrong; no vocabulary, no id check."""
    tokens, positions, temperatures = request.token_ids, request.positions, request.temperatures
    if len(tokens) > context_length:
        raise PromptTooLongError(
            f"a sequence to score has {len(tokens)} tokens, the context only {context_length}",
            prompt_tokens=str(len(tokens)),
            context_tokens=str(context_length),
        )
    problem = ""
    if len(positions) and not 1 <= int(positions.min()) <= int(positions.max()) < len(tokens):
        problem = f"positions {positions.min()}…{positions.max()} are not within 1…{len(tokens) - 1}"
    elif len(temperatures) != len(positions):
        problem = f"{len(temperatures)} temperatures for {len(positions)} positions"
    elif not (temperatures > 0).all():
        problem = f"a temperature is {temperatures.min()}; tokens that were not drawn have no log-probability"
    elif vocab_size is not None and len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        problem = f"token ids outside 0…{vocab_size - 1}"
    if problem:
        raise InvalidRequestError(f"score request {request.request_id!r}: {problem}")


def _problem_with_forced(request: GenerationRequest, vocab_size: int | None) -> str:
    tokens = request.forced_ids
    if not tokens:
        return "forced_ids is missing, and the replay engine (engine: forced) samples none"
    if vocab_size is not None and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        return f"the forced tokens reach outside 0…{vocab_size - 1}"
    early = tokens[: request.sampling.min_new_tokens]
    if any(token in request.stop_token_ids for token in early):
        return f"the forced tokens stop before min_new_tokens ({request.sampling.min_new_tokens})"
    return ""


# --- A tokenizer of bytes with a plain chat template, for runs without a model (the scripted engine).


_BEGIN, _END = "<|im_start|>", "<|im_end|>"
_IDS = {_BEGIN: 256, _END: 257}
_SPECIAL = re.compile("|".join(map(re.escape, _IDS)))


class ByteTokenizer:
    """One token per byte."""

    chat_template = "bytes"
    eos_token_id = _IDS[_END]
    all_special_ids = list(_IDS.values())
    all_special_tokens = list(_IDS)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        text = "".join(f"{_BEGIN}{m['role']}\n{m['content']}{_END}" for m in messages)
        return f"{text}{_BEGIN}assistant\n" if add_generation_prompt else text

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in _SPECIAL.finditer(text):
            ids += text[position : match.start()].encode()
            ids.append(_IDS[match.group()])
            position = match.end()
        return ids + list(text[position:].encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        names = {number: "" if skip_special_tokens else name for name, number in _IDS.items()}
        parts: list[bytes] = [
            names[i].encode() if i in names else bytes([i]) if i < 256 else b"?" for i in map(int, token_ids)
        ]
        return b"".join(parts).decode(errors="replace")
