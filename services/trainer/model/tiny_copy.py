"""Small models of the architecture of a config, for tests of what the architecture computes.

Widths, heads and vocabulary are divided; kinds of layers, experts and all formulas stay. Weights are drawn so large that
every module has an effect on the logits: with those of an untrained model most effects are below any bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

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
