"""Compares a LoRA adapter with the training of all weights, and the served log-probabilities with PEFT.

Served: the torch engine generates through a swap of the adapter, in torch and in compiled code. ``gap_before``, ``gap_across`` and
``gap_after`` are the largest distances of a served log-probability from a forward pass of PEFT (of a merged model where
PEFT is not installed, see ``oracle``), for tokens before the swap, tokens of requests that it interrupted, and requests
after it.

Trained: one training step of a model with and without an adapter, interleaved, in CPU seconds of this process
(``ratio``: adapter / all weights), the bytes of a published version, of a checkpoint, and of gradients and moments.

    python benchmarks/adapters.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib.util
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks._bench import median_and_spread, report
from extras.compiled import step as native_step
from services.common.config.training import AdapterConfig, OptimizerConfig
from services.common.lora import identity_of, initial_adapter, target_modules
from services.common.weights.snapshot import PEFT_PREFIX, A, B
from services.inference.engine.base import WeightUpdate
from services.inference.engine.torch.blocks import Adapter
from services.inference.engine.torch.engine import TorchEngine
from services.trainer.checkpoints import CheckpointIdentity, Checkpoints
from services.trainer.model.policy_model import AdapterSetup
from services.trainer.publish import Snapshots
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep
from tests.conformance.subjects import until_tokens
from tests.random_models import build_model, make_prompt, make_request, max_gap
from tests.unit.trainer.building import VOCAB, algorithm, rank_batch, train_step, training_sequences

RANKS = Ranks.single()
DECODERS = {"compiled": native_step.PACKED_BYTES, "torch": 0}
PROMPT, NEW_TOKENS, REQUESTS = 30, 200, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    torch.set_num_threads(1)
    config = AdapterConfig(rank=options.rank, alpha=2.0 * options.rank)
    has_peft = importlib.util.find_spec("peft") is not None
    gaps = {decoder: asyncio.run(_served(decoder, config, has_peft)) for decoder in DECODERS}
    adapted, whole, facts = _trained(config, repeats=3 if options.quick else 8, hidden=256 if options.quick else 512)
    ratio, spread = median_and_spread([a / b for a, b in zip(adapted, whole, strict=True)])
    report(
        "adapters",
        median_and_spread(adapted)[0],
        median_and_spread(whole)[0],
        ratio,
        spread,
        **{f"gap_{when}": max(gap[index] for gap in gaps.values()) for index, when in enumerate(_WHEN)},
        oracle="peft" if has_peft else "merged",
        **facts,
        left_out={} if has_peft else {"peft": "PEFT is not installed; the oracle is a merged model"},
    )


# -- served ----------------------------------------------------------------------------------------------------------

_WHEN = ("before", "across", "after")


async def _served(decoder: str, config: AdapterConfig, has_peft: bool) -> tuple[float, float, float]:
    native_step.PACKED_BYTES = DECODERS[decoder]
    base = build_model("qwen3")
    versions = [_version(base, number, config) for number in range(3)]
    oracles = [(_with_peft if has_peft else _merged)(base, tensors, config) for tensors in versions]
    scale = identity_of(base, config, "").scale
    engine = TorchEngine(
        build_model("qwen3"), num_slots=REQUESTS, context_length=1024, adapter=Adapter(tensors=versions[0], scale=scale)
    )
    await engine.start()
    found: dict[str, list[float]] = {when: [0.0] for when in _WHEN}
    for number in (1, 2):
        prompts = [make_prompt(PROMPT, seed) for seed in range(REQUESTS)]
        running = [
            asyncio.ensure_future(engine.generate(make_request(prompt, seed=seed, max_new_tokens=NEW_TOKENS)))
            for seed, prompt in enumerate(prompts)
        ]
        await until_tokens(engine, REQUESTS * NEW_TOKENS // 3)
        await engine.update(WeightUpdate.full(versions[number], number))
        for prompt, generation in zip(prompts, await asyncio.gather(*running), strict=True):
            before, across = generation.segments
            found["before"].append(max_gap(oracles[number - 1], prompt, generation, before))
            found["across"].append(max_gap(oracles[number], prompt, generation, across))
        later = await engine.generate(make_request(prompts[0], max_new_tokens=NEW_TOKENS))
        found["after"].append(max_gap(oracles[number], prompts[0], later, later.segments[0]))
    await engine.stop()
    return max(found["before"]), max(found["across"]), max(found["after"])


def _version(model: Any, number: int, config: AdapterConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tensors = initial_adapter(model, config, seed=1)
    moved = {n: t + 0.05 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    return moved if number else tensors


def _with_peft(model: Any, tensors: dict[str, torch.Tensor], config: AdapterConfig) -> Any:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    settings = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=config.targets, task_type="CAUSAL_LM")
    made = get_peft_model(copy.deepcopy(model), settings)
    assert not set_peft_model_state_dict(made, tensors).unexpected_keys
    return made.eval()


@torch.no_grad()
def _merged(model: Any, tensors: dict[str, torch.Tensor], config: AdapterConfig) -> Any:
    made = copy.deepcopy(model)
    for name, module in target_modules(made, config).items():
        low, high = (tensors[f"{PEFT_PREFIX}{name}.{factor}"] for factor in (A, B))
        module.weight += config.alpha / config.rank * high @ low
    return made


# -- trained ---------------------------------------------------------------------------------------------------------


def _trained(config: AdapterConfig, repeats: int, hidden: int) -> tuple[list[float], list[float], dict[str, float]]:
    setup = AdapterSetup(config=config, dtype=torch.float32, seed=1)
    steps = {"adapter": _step(hidden, setup), "whole": _step(hidden, None)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(repeats + 1):
        for name, step in steps.items():
            began = time.process_time()
            step.run(rank_batch(training_sequences(32, seed=number), step=number + 1))
            if number:  # the first creates moments
                seconds[name].append(time.process_time() - began)
    facts: dict[str, float] = {}
    for name, step in steps.items():
        facts |= {f"{key}_{name}": value for key, value in _bytes(step).items()}
    return seconds["adapter"], seconds["whole"], facts


def _step(hidden: int, setup: AdapterSetup | None) -> TrainStep:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
            head_dim=hidden // 8, intermediate_size=3 * hidden, tie_word_embeddings=True,
        )
    )  # fmt: skip
    optimizer = OptimizerConfig(lr=1e-4)
    return train_step(algorithm("m2po"), causal_lm=model, adapter=setup, optimizer=optimizer, max_tokens=2048)


def _bytes(step: TrainStep) -> dict[str, float]:
    """Bytes of a version in float32, of a checkpoint, and of gradients and moments."""
    trained = sum(p.numel() * p.element_size() for p in step.optimizer.parameters)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        written = Snapshots(step.model, RANKS, run_id="r", policy="p", dtype="float32", directories=(place,)).write(1)
        assert written is not None
        checkpoints = Checkpoints(place / "c", CheckpointIdentity(run_id="r", policy="p"), 1, RANKS)
        checkpoints.save(1, step.model, step.optimizer)
        stored = sum(file.stat().st_size for file in checkpoints.path(1).rglob("*") if file.is_file())
    return {
        "version_bytes": written.manifest.size_bytes,
        "checkpoint_bytes": stored,
        "gradient_and_moment_bytes": 3 * trained,
    }


if __name__ == "__main__":
    main()
