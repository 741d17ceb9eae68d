"""Measures the cost of a checkpoint: seconds to save, verify and load, and bytes, against torch.distributed.checkpoint.

``ours`` is the trainer's way: safetensors and a manifest of digests, all synced to the disk, read back before the
oldest goes; verified before loading. ``theirs`` is ``dcp.save`` and ``dcp.load`` of the same model and optimizer,
which do not sync, keep no digests and unpickle the files. Both in turn, in one process, on one disk. ``fsync_s``
is the part of ``save_s`` spent waiting for the disk; ``read_s`` is the time of reading the files alone, the bound of
verifying. ``pause_s`` is the time that training waits for a checkpoint that is written while training goes on: the copy
to host memory. ``background_s`` is the time until that one is durable.

    python benchmarks/checkpoint_cost.py [--quick] [--directory DIR]
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks._bench import median_and_spread, report
from services.common.checkpoints import find_damage, read_manifest
from services.common.config.training import OptimizerConfig
from services.trainer.checkpoints import Checkpoints
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import PolicyModel, build_policy_model
from services.trainer.ranks import Ranks

RANKS = Ranks.single()


def trained(width: int, num_layers: int) -> tuple[PolicyModel, PolicyOptimizer]:
    """A model with random weights, after one update with random gradients."""
    config = Qwen3Config(
        vocab_size=16_000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=num_layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8, tie_word_embeddings=True,
    )  # fmt: skip
    model = build_policy_model(Qwen3ForCausalLM(config), RANKS)
    optimizer = PolicyOptimizer(model.named_parameters(), OptimizerConfig(lr=1e-3))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.update()
    return model, optimizer


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Syncs:
    """Seconds spent in fsync."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._fsync = os.fsync

    def __enter__(self) -> Syncs:
        def fsync(fd: int) -> None:
            began = time.perf_counter()
            self._fsync(fd)
            self.seconds += time.perf_counter() - began

        os.fsync = fsync  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync = self._fsync


def ours(directory: Path, model: PolicyModel, optimizer: PolicyOptimizer) -> dict[str, float]:
    checkpoints = Checkpoints(directory, "r", "p", 1, RANKS)
    with Syncs() as syncs:
        save_s = timed(lambda: checkpoints.save(1, model, optimizer))
    path = checkpoints.path(1)
    manifest = read_manifest(path)
    verify_s = timed(lambda: find_damage(path, list(manifest.files)))
    load_s = timed(lambda: checkpoints.load(1, model, optimizer))
    own_read_s = read_s(path)
    size = float(size_of(path))
    pause_s = timed(lambda: checkpoints.begin(2, model, optimizer))
    background_s = pause_s + timed(checkpoints.finish)
    return {
        "save_s": save_s, "pause_s": pause_s, "background_s": background_s, "fsync_s": syncs.seconds, "verify_s": verify_s, "load_s": load_s, "read_s": own_read_s,
        "bytes": size,
    }  # fmt: skip


def theirs(directory: Path, model: PolicyModel, optimizer: PolicyOptimizer) -> dict[str, float]:
    def save() -> None:
        weights, moments = get_state_dict(model, optimizer.adamw)
        dcp.save({"weights": weights, "moments": moments}, checkpoint_id=directory, no_dist=True)

    def load() -> None:
        weights, moments = get_state_dict(model, optimizer.adamw)
        dcp.load({"weights": weights, "moments": moments}, checkpoint_id=directory, no_dist=True)
        set_state_dict(model, optimizer.adamw, model_state_dict=weights, optim_state_dict=moments)

    return {"save_s": timed(save), "load_s": timed(load), "bytes": float(size_of(directory))}


def read_s(path: Path) -> float:
    def read() -> None:
        buffer = bytearray(8 << 20)
        for file in path.rglob("*.safetensors"):
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass

    return timed(read)


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a model of 24 instead of 130 million parameters")
    parser.add_argument(
        "--directory", type=Path, help="on the disk to measure; left out, the system's for temporary files"
    )
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")  # that there is one process
    torch.set_num_threads(1)
    model, optimizer = trained(*((512, 5) if arguments.quick else (1024, 9)))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    arms: dict[str, Any] = {"ours": ours, "theirs": theirs}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="rollmill-checkpoints-") as made:
        for turn in range(4):
            for name in (list(arms), list(arms)[::-1])[turn % 2]:
                directory = Path(made) / name
                measured = arms[name](directory, model, optimizer)
                shutil.rmtree(directory)
                os.sync()  # no arm waits for the writes of the one before
                if turn:  # the first is for imports and pools
                    found[name].append(measured)
    middle = {
        name: {key: median_and_spread([each[key] for each in turns])[0] for key in turns[0]}
        for name, turns in found.items()
    }
    mine, other = middle["ours"], middle["theirs"]
    spread = median_and_spread([each["save_s"] for each in found["ours"]])[1]
    print(f"{num_parameters / 1e6:.0f} M parameters, {mine['bytes'] / (1 << 20):.0f} MiB with AdamW's moments")
    report(
        "checkpoint_cost", mine["save_s"], other["save_s"], mine["save_s"] / other["save_s"], spread,
        num_parameters=num_parameters, bytes=mine["bytes"], their_bytes=other["bytes"],
        save_s=mine["save_s"], pause_s=mine["pause_s"], background_s=mine["background_s"], fsync_s=mine["fsync_s"], load_s=mine["load_s"], verify_s=mine["verify_s"],
        read_s=mine["read_s"], their_save_s=other["save_s"], their_load_s=other["load_s"],
        ratios={
            "save": mine["save_s"] / other["save_s"],
            "save_without_fsync": (mine["save_s"] - mine["fsync_s"]) / other["save_s"],
            "pause_to_save": mine["pause_s"] / mine["save_s"],
            "load": mine["load_s"] / other["load_s"],
            "verify_to_read": mine["verify_s"] / mine["read_s"],
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
