"""Which causal language models the trainer computes right: every model type of the installed transformers, built small.

Each model is saved and loaded as a run does (``load_policy_model``, ``pack``, forward pass), and its log-probabilities are
compared with the plain forward pass of transformers over each document alone. The documents are not those of the trainer's own
test at load, and some are longer than every window and switch of rotary factors that the variants set. Variants of a type:

    plain        the defaults of its config
    noise        every dropout and jitter at 0.1
    window       windows and chunks of 16 tokens
    layers       one kind of layer beside attention in turn, for types that mix them
    longrope     rotary factors that switch at 16 tokens
    dynamic      rotary factors that depend on the longest sequence
    factors      every multiplier and scale at 0.5

``exact``: 2e-4 nats at most. ``refused``: a ``ModelMismatchError`` or ``ConfigError``, at load or for the documents beyond a
limit (then the shorter ones are compared, and must be exact). ``wrong``: computed and not exact. ``crash``: any other error.

    python benchmarks/models.py [--quick] [--types llama,lfm2] [--details FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from benchmarks._bench import report_facts
from services.common.errors import ConfigError, ModelMismatchError
from services.trainer.model.micro_batches import Document, forward, pack
from services.trainer.model.policy_model import PolicyModel, load_policy_model
from services.trainer.model.self_test import build, numbers, tiny_copies, with_number
from services.trainer.ranks import Ranks

BOUND = 2e-4
SHORT, LONG = (11, 7, 13, 5), (17, 40, 9, 23, 33)
SHARED = 5  # tokens that two documents begin with
SWITCH = 16
LAYERS, EXPERTS = 4, 16
QUICK = (
    "llama",
    "lfm2",
    "bloom",
    "opt",
    "gemma3_text",
    "granite",
    "phimoe",
    "phi3",
    "mistral",
    "stablelm",
    "jamba",
    "qwen3_moe",
)
# Values that a config needs and its defaults lack.
_FILLED = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "topk_method": "greedy",
}

Tree = dict[str, Any]


def small_configs(model_type: str) -> tuple[Any, Tree]:
    """The default config of a type, and the smallest copy of it that computes."""
    config = CONFIG_MAPPING[model_type]()
    error: Exception = ValueError("no copy")
    absent = {key: value for key, value in _FILLED.items() if getattr(config, key, 0) is None}
    for tree in (small for copy in tiny_copies(config) for small in (few(copy), copy)):
        for filled in (tree, {**tree, **absent}):
            try:
                with torch.no_grad():
                    build(config, filled)(input_ids=torch.arange(1, 9)[None], use_cache=False)
                return config, filled
            except Exception as caught:  # noqa: BLE001 - code of any architecture
                error = caught
    raise error


def few(tree: Tree) -> Tree:
    """The config with four layers and sixteen experts, so that a survey takes minutes."""
    number = next((tree[key] for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if tree.get(key)), 0)
    found: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found[key] = few(value)
        elif isinstance(value, (list, str)) and len(value) == number:
            found[key] = value[:LAYERS]
        elif type(value) is int and value == number and "layer" in key:
            found[key] = min(value, LAYERS)
        else:
            found[key] = EXPERTS if type(value) is int and "experts" in key and value > EXPERTS else value
    return found


def variants(tree: Tree) -> Iterator[tuple[str, Tree]]:
    """Configs by name. Not every one makes a model."""
    yield "plain", tree
    yield from _changed(
        "noise",
        tree,
        lambda key, v: (
            0.1 if isinstance(v, float) and ("drop" in key or "jitter" in key or key.endswith("pdrop")) else v
        ),
    )
    yield from _changed(
        "factors",
        tree,
        lambda key, v: 0.5 if isinstance(v, float) and any(p in key for p in ("multiplier", "scal", "scale")) else v,
    )
    windowed = tree
    for at, value in numbers(tree):
        if any(part in at[-1] for part in ("window", "chunk", "topk")) and value > SWITCH:
            windowed = with_number(windowed, at, SWITCH)
    for key in ("sliding_window", "attention_chunk_size"):
        if key in windowed and not windowed[key]:
            windowed = {**windowed, key: SWITCH}
    if windowed != tree:
        yield (
            "window",
            {
                **windowed,
                **({"use_sliding_window": True, "max_window_layers": 0} if "use_sliding_window" in tree else {}),
            },
        )
    layers = tree.get("layer_types")
    if isinstance(layers, list) and layers:
        for kind in ("conv", "linear_attention", "sliding_attention", "chunked_attention", "mamba", "full_attention"):
            mixed = [kind if index % 2 == 0 else "full_attention" for index in range(len(layers))]
            if mixed != layers:
                yield f"layers {kind}", {**windowed, "layer_types": mixed}
    rope = tree.get("rope_parameters")
    width = tree.get("head_dim") or tree.get("hidden_size", 0) // (tree.get("num_attention_heads") or 1)
    if isinstance(rope, dict) and "rope_theta" in rope and width:
        half = width * rope.get("partial_rotary_factor", 1.0) / 2
        long = {"short_factor": [1.0] * int(half), "long_factor": [3.0] * int(half), "factor": 4.0}
        yield "longrope", {**tree, "original_max_position_embeddings": SWITCH, "rope_parameters": {**rope, **long, "rope_type": "longrope", "original_max_position_embeddings": SWITCH}}  # fmt: skip
        yield (
            "dynamic",
            {
                **tree,
                "max_position_embeddings": SWITCH,
                "rope_parameters": {**rope, "rope_type": "dynamic", "factor": 2.0},
            },
        )


def _changed(name: str, tree: Tree, change: Any) -> Iterator[tuple[str, Tree]]:
    changed = {key: change(key, value) for key, value in tree.items()}
    if changed != tree:
        yield name, changed


def documents(lengths: tuple[int, ...], vocabulary: int) -> list[Document]:
    """Random documents; the first two begin alike."""
    drawn = np.random.default_rng(7)
    rows = [drawn.integers(0, vocabulary, length, dtype=np.int32) for length in lengths]
    rows[1][:SHARED] = rows[0][:SHARED]
    return [Document.supervised(row, np.arange(len(row)) > 0) for row in rows]


@torch.no_grad()
def scored(model: PolicyModel, given: list[Document]) -> list[torch.Tensor]:
    """The log-probabilities of each document, from one row."""
    (batch,) = pack(given, 1 << 20)
    logprobs, *_ = forward(model, batch, 1.0)
    found = {source: logprobs[batch.sequence_index == place] for place, source in enumerate(batch.sources)}
    return [found[source] for source in range(len(given))]


@torch.no_grad()
def alone(model: Any, given: list[Document]) -> list[torch.Tensor]:
    """The same by transformers."""
    found = []
    for document in given:
        tokens = torch.as_tensor(document.token_ids, dtype=torch.int64)
        scores = model(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
        found.append(scores[:-1].gather(1, tokens[1:, None])[:, 0])
    return found


def difference(path: Path, policy: PolicyModel, lengths: tuple[int, ...]) -> float:
    """Most nats between the two, over three packings. Infinite where one is no number."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    given = documents(lengths, policy.causal_lm.get_input_embeddings().weight.shape[0])
    expected = alone(plain, given)
    worst = 0.0
    for chosen in (range(len(given)), (1,), (3, 2, 1, 0)):
        for ours, theirs in zip(scored(policy, [given[i] for i in chosen]), (expected[i] for i in chosen), strict=True):
            gap = float((ours - theirs).abs().max())
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def verdict(config: Any, tree: Tree) -> tuple[str, str] | None:
    """(exact, refused, wrong or crash; the reason or the figure); None where transformers itself makes nothing of the config."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            model = build(config, tree, seed=1)
            for document in documents(LONG, 32):
                with torch.no_grad():
                    logits = model(
                        input_ids=torch.as_tensor(document.token_ids, dtype=torch.int64)[None], use_cache=False
                    ).logits
                assert logits.isfinite().all()
            model.save_pretrained(path)
            AutoModelForCausalLM.from_pretrained(path)
        except Exception:  # noqa: BLE001 - code of any architecture
            return None
        try:
            policy = load_policy_model(path, Ranks.single())
        except (ModelMismatchError, ConfigError) as error:
            return "refused", error.message
        except Exception as error:  # noqa: BLE001 - code of any architecture
            return "crash", f"{type(error).__name__}: {error}"
        try:
            worst = difference(path, policy, LONG)
        except ModelMismatchError as error:
            worst = difference(path, policy, SHORT)
            kind = "refused" if worst <= BOUND else "wrong"
            return (
                kind,
                f"{error.message}; shorter ones: {worst:.1g}"
                if kind == "refused"
                else f"short documents {worst:.2g} nats",
            )
        except Exception as error:  # noqa: BLE001 - code of any architecture
            return "crash", f"{type(error).__name__}: {error}"
        return ("exact" if worst <= BOUND else "wrong"), f"{worst:.2g} nats"


def survey(types: list[str]) -> dict[str, Any]:
    """Counts and lists by verdict, of types and variants."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in ("exact", "refused", "wrong", "crash", "skipped")}
    for model_type in types:
        began = time.monotonic()
        try:
            config, tree = small_configs(model_type)
        except Exception as error:  # noqa: BLE001 - code of any architecture
            found["skipped"][model_type] = f"{type(error).__name__}: {error}"[:160]
            continue
        told = []
        for name, changed in variants(tree):
            if (result := verdict(config, changed)) is not None:
                kind, reason = result
                found[kind][model_type if name == "plain" else f"{model_type}, {name}"] = reason
                told.append(f"{name} {kind}" + (f" ({reason})" if kind in ("wrong", "crash") else ""))
        print(f"{model_type:24s} {'; '.join(told)}  [{time.monotonic() - began:.0f} s]", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a dozen types, one for each kind")
    parser.add_argument("--types", help="these types only, with commas between them")
    parser.add_argument("--details", type=Path, help="write the reason of each verdict to this JSON file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    torch.set_num_threads(1)
    types = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if arguments.quick or arguments.types:
        types = list(QUICK) if arguments.quick else arguments.types.split(",")
    found = survey(types)
    if arguments.details:
        arguments.details.write_text(json.dumps(found, indent=1))
    report_facts(
        "models",
        **{kind: len(found[kind]) for kind in found},
        types=len(types) - len(found["skipped"]),
        lists={kind: sorted(found[kind]) for kind in ("refused", "wrong", "crash", "skipped")},
    )


if __name__ == "__main__":
    main()
