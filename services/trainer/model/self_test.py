"""Compares a model as the trainer computes it with the model's own forward pass, and refuses what differs.

    check_architecture   a tiny copy of the config in float32 on the CPU: any layer that lets one packed document into another,
                         attention code of its own, noise, heads beyond a matrix and a factor; then copies in which each number
                         of the config that may be a length is small, for windows and switches of rotary factors
    check_loaded         the loaded model itself, in the run's type, attention kernel and sharding: a few tokens

Both pack short documents into one row for ``PolicyModel.forward``, of which two begin alike, and give each alone to the model's
own forward pass.
Nothing here knows names of architectures: an effect decides. Bounds of a difference between log-probabilities:

* float32: 1e-3 for each token. Equal formulas differ by 1e-6 to 1e-5.
* 16 bits: 0.25 in the mean. Rounding of logits and states alone makes up to 0.1; a mask that is wrong makes 1 or more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.common.errors import ModelMismatchError, RollmillError
from services.trainer.model.micro_batches import Document, forward, pack
from services.trainer.ranks import local_rows, peer_loss, reshard

BOUND, BOUND_16_BITS = 1e-3, 0.25
# Tokens of the documents. Windows up to 6 and switches of rotary factors up to 7 show, because the last state that predicts
# sees 7 tokens, and 3 tokens are the fewest with a distance.
_SHORT = (3, 8)
_LOADED = (4, 6)  # no limit is as short
_LOWERED = 8  # a number that may be a length, in a copy; documents of the second length go beyond it
_AROUND = (6, 12)
_REMEDY = "train a model of another architecture (docs/trainer.md lists those that were tried)"

Rows = list[torch.Tensor]  # the tokens of each document
Make = Callable[[Any], Any]  # a policy model of a causal LM


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The longest document that a model computes packed as it computes it alone."""

    model: str  # its class
    field: str  # of config.json
    tokens: int

    def check(self, length: int) -> None:
        """Raise ``ModelMismatchError`` for longer documents."""
        if length <= self.tokens:
            return
        raise ModelMismatchError(
            f"{self.model} computes documents of more than {self.tokens} tokens ({self.field} of its config.json) in a way that "
            f"packed training does not, and a document may have {length}: write model.context_length: {self.tokens} or less"
        )


_LIMITS: dict[str, Limit | None] = {}  # by the text of a config: a policy and its reference are compared once


def check_loaded(model: Any, device: torch.device) -> None:
    """Compare a loaded model, and set the factor of its head. A collective: each rank computes the same tokens.

    Raises ``ModelMismatchError`` for a difference.
    """
    size = model.causal_lm.get_input_embeddings().weight.shape[0]
    _check(model, _documents(_LOADED, size, device))


def check_architecture(config: Any, make: Make) -> Limit | None:
    """Compare tiny copies of a config; returns the longest document that is computed right, None if any is.

    Raises ``ModelMismatchError`` for a difference, and ``NoTinyCopyError`` for a config of which no small model can be made.
    """
    key = config.to_json_string(use_diff=False)
    if key not in _LIMITS:
        _LIMITS[key] = _limit(config, make)
    return _LIMITS[key]


def _limit(config: Any, make: Make) -> Limit | None:
    model, tree = _smallest(config, make)
    _check(model, _documents(_SHORT))
    original = dict(numbers(config.to_dict()))
    limits = [
        Limit(model=type(model.causal_lm).__name__, field=".".join(at), tokens=original[at])
        for at, value in numbers(tree)
        if value >= max(_SHORT) - 1
        and not is_size(at[-1])
        and _is_limit(config, with_number(tree, at, min(value, _LOWERED)), make)
    ]
    return min(limits, key=lambda limit: limit.tokens, default=None)


def _check(model: Any, documents: Rows) -> None:
    """Refuse a difference."""
    name = type(model.causal_lm).__name__
    with _refusing(name):
        difference, bound = _compare(model, documents)
    if not math.isfinite(difference):
        names = [of for of, weight in model.named_parameters() if not local_rows(weight)[0].isfinite().all()]
        raise ModelMismatchError(
            f"{name} computes log-probabilities of {difference} nats: "
            + (f"{names[0]} has values that are infinite or NaN: copy the weights again" if names else _REMEDY)
        )
    if not difference <= bound:
        raise ModelMismatchError(
            f"{name} computes other log-probabilities packed than alone: they differ by {difference:.2g} nats "
            f"{'in the largest' if bound == BOUND else 'in the mean'}, and {bound:g} is allowed: {_REMEDY}"
        )


def _smallest(config: Any, make: Make) -> tuple[Any, dict[str, Any]]:
    """The first tiny copy that computes, with its config."""
    reason: Exception = ValueError("its config has no copy")
    for tree in tiny_copies(config):
        try:
            model = build(config, tree)
            with torch.no_grad():
                model(input_ids=_documents(_SHORT)[0][None], use_cache=False)
        except Exception as error:  # noqa: BLE001 - code of any architecture, with sizes that its authors did not try
            reason = error
            continue
        with _refusing(type(model).__name__):
            return make(model), tree
    raise NoTinyCopyError(f"{type(reason).__name__}: {reason}")


def _is_limit(config: Any, tree: dict[str, Any], make: Make) -> bool:
    """Whether short documents are computed as alone, and longer ones than the lowered number are not."""
    try:
        model = make(build(config, tree))
        difference, bound = _compare(model, _documents((6, 4)))
        model.plain(_documents(_AROUND)[1])
    except Exception:  # noqa: BLE001 - no model, or one of as many positions
        return False
    if not difference <= bound:
        return False
    try:
        difference, bound = _compare(model, _documents(_AROUND))
    except Exception:  # noqa: BLE001 - a refusal of the attention, or a mask of another shape
        return True
    return not difference <= bound


@torch.no_grad()
def _compare(model: Any, documents: Rows) -> tuple[float, float]:
    """The difference of the documents, and of a third one which begins as the longest, and its bound, in nats.
    Also sets the factor of the head."""
    given = [*documents, torch.cat([documents[1][:2], documents[0][:3]])]
    passes = [model.plain(tokens) for tokens in given]
    plain = [logits.float() for logits, _ in passes]
    is_exact = passes[0][1].dtype in (torch.float32, torch.float64)
    factor = _factor(torch.cat(plain), torch.cat([ours for _, ours in passes]).float())
    model.logit_scale = factor if factor > 0 and abs(factor - 1) > (1e-5 if is_exact else 1e-3) else 1.0
    found, sources = _packed(model, given)
    expected = [plain[source][:-1].log_softmax(-1).gather(1, given[source][1:, None])[:, 0] for source in sources]
    reshard(model)
    difference = (found.float() - torch.cat(expected)).abs()
    return (float(difference.max()), BOUND) if is_exact else (float(difference.mean()), BOUND_16_BITS)


def _packed(model: Any, documents: Rows) -> tuple[torch.Tensor, list[int]]:
    """Log-probabilities of all tokens but the first of each document, from one row, and the order of the documents in it."""
    rows = [Document.supervised(tokens.cpu().numpy(), np.arange(len(tokens)) > 0) for tokens in documents]
    (batch,) = pack(rows, 1 << 10, documents[0].device)
    found, *_ = forward(model, batch, 1.0)
    return found, list(batch.sources)


def _factor(logits: torch.Tensor, ours: torch.Tensor) -> float:
    """The factor between a head's logits and those of its matrix, by least squares."""
    return float((logits * ours).double().sum() / ours.double().square().sum())


def _documents(lengths: tuple[int, int], vocabulary: int = 32, device: torch.device | str = "cpu") -> Rows:
    """Documents of tokens that are far apart in a vocabulary."""
    numbers_ = torch.arange(1, 1 + sum(lengths)) * 7919 % min(vocabulary, 1 << 20)
    return [part.to(device) for part in numbers_.split(list(lengths))]


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Any error of the code of an architecture is a refusal; a lack of memory or a lost rank is none."""
    try:
        yield
    except (RollmillError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if peer_loss(error) is not None or isinstance(error, torch.AcceleratorError):
            raise
        raise ModelMismatchError(
            f"{name} cannot be computed on packed documents ({type(error).__name__}: {' '.join(str(error).split())[:200]}): {_REMEDY}"
        ) from error


# --- Small models of the architecture of a config: widths, heads and vocabulary are divided; kinds of layers, experts and all
# formulas stay. Weights are drawn so large that every module has an effect on the logits: with those of an untrained model most
# effects are below any bound.


VOCABULARY = 64
_LAYERS = 8  # more than one period of the patterns in use
_HEAD_DIM = 16
_MULTIPLE = 8  # of widths, as grouped matrix products ask
_MOST_PARAMETERS = 120_000_000

Path = tuple[str, ...]  # of a value in the nested dictionaries of a config


class NoTinyCopyError(Exception):
    """No small model could be made of a config; the message is the last reason."""


def numbers(tree: dict[str, Any], at: Path = ()) -> Iterator[tuple[Path, int]]:
    """The integers of a config, with their places."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from numbers(value, (*at, key))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield (*at, key), value


def with_number(tree: dict[str, Any], at: Path, value: int) -> dict[str, Any]:
    """The config with another value at a place."""
    head, *rest = at
    return {**tree, head: with_number(tree[head], tuple(rest), value) if rest else value}


def is_size(key: str) -> bool:
    """Whether a number of a config is a width, a number of heads, experts or layers, or a token: none depends on lengths."""
    return any(
        part in key for part in ("size", "dim", "rank", "width", "d_", "n_", "num_", "embd", "_id", "head", "state")
    ) and not any(part in key for part in ("window", "chunk", "position", "ctx"))


def build(config: Any, tree: dict[str, Any], seed: int = 0) -> Any:
    """A model of the config's class with drawn weights, in float32 on the CPU and in evaluation mode."""
    from transformers import AutoModelForCausalLM

    small = type(config).from_dict(tree)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(small, dtype=torch.float32).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim < 2:
                parameter.add_(noise, alpha=0.1)  # a norm's weight stays near 1
            else:
                parameter.copy_(noise * math.prod(parameter.shape[1:]) ** -0.5 if parameter.ndim == 2 else noise * 0.2)
        model.get_input_embeddings().weight.normal_()
        head = model.get_output_embeddings()
        if head is not None and head.weight is not model.get_input_embeddings().weight:
            head.weight.mul_(4)  # else a cap on the logits has no effect
    return model.eval()


def tiny_copies(config: Any) -> Iterator[dict[str, Any]]:
    """Configs of small models, the smallest first; the last is the config itself."""
    tree = config.to_dict()
    found = {at[-1]: value for at, value in numbers(tree) if value > 1}
    heads = [value for key, value in found.items() if "head" in key and not _is_head_dim(key)]
    common = math.gcd(*heads) if heads else 1
    # Two heads at least, so that a mixture of heads shows.
    shared = next(
        common // part
        for part in range(1, common + 1)
        if common % part == 0 and max(heads, default=2) * part >= 2 * common
    )
    width = next((found[key] for key in ("hidden_size", "d_model", "n_embd") if key in found), 0)
    head_dim = found.get("head_dim") or (width // max(heads) if heads else 0)
    narrow = 1 << max(0, (head_dim // _HEAD_DIM).bit_length() - 1)
    for layers in (_LAYERS, 0):
        for by_heads, by_dim in ((shared, narrow), (shared, 1), (1, narrow)):
            yield _shrunk(tree, by_heads, by_dim, layers)
    yield tree


def _shrunk(tree: dict[str, Any], by_heads: int, by_dim: int, layers: int) -> dict[str, Any]:
    num_layers = next(
        (tree[key] for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if tree.get(key)), 0
    )
    small: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            small[key] = _shrunk(value, by_heads, by_dim, layers)
        elif isinstance(value, (list, str)) and layers and len(value) == num_layers > layers:
            all_kinds = max(value.index(kind) for kind in value) + 1  # the shortest beginning with all kinds of layers
            small[key] = value[: max(layers, all_kinds)]
        else:
            small[key] = _divided(key, value, by_heads, by_dim) if type(value) is int and value > 1 else value
    if layers and num_layers > layers:
        lengths = [
            len(value) for key, value in small.items() if isinstance(value, list) and len(tree[key]) == num_layers
        ]
        for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if key in small:
                small[key] = max([layers, *lengths])
                small |= {
                    k: tree[k][: small[key]] for k in small if isinstance(tree[k], list) and len(tree[k]) == num_layers
                }
    return small


def _is_head_dim(key: str) -> bool:
    return "head" in key and any(part in key for part in ("dim", "size", "d_head"))


def _divided(key: str, value: int, by_heads: int, by_dim: int) -> int:
    if "vocab" in key:
        return min(value, VOCABULARY)
    if key.endswith("_id"):
        return value % VOCABULARY
    if not is_size(key) or ("expert" in key and "size" not in key):
        return value
    if any(part in key for part in ("intermediate", "ffn", "rank", "mlp")):  # of a layer alone: any multiple will do
        return max(_MULTIPLE, value // (by_heads * by_dim) // _MULTIPLE * _MULTIPLE)
    if _is_head_dim(key):
        factor = by_dim
    elif "head" in key:
        return value // by_heads if value % by_heads == 0 else value
    elif any(part in key for part in ("hidden", "model", "embd", "inner", "ssm", "width")):
        factor = by_heads * by_dim
    else:
        factor = by_dim if "dim" in key or "state" in key else 1
    while value % factor or (value // factor % _MULTIPLE and factor > 1):
        factor = factor // 2 or 1
    return value // factor
