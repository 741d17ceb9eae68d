"""Validates generation requests against an engine's context and vocabulary, before the engine takes them."""

from __future__ import annotations

from services.common.errors import InvalidRequestError, PromptTooLongError
from services.inference.engine.base import GenerationRequest, ScoreRequest


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
