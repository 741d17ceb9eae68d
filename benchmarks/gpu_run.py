"""Trains a model of .4 billion parameters in a whole run on one GPU, with every process real: rollouts, judge, weights, steps.

The model has the layers of Qwen3-0.6B, the vocabulary of the quickstart and random weights; the reward is the parity of the
answer's length. A learning signal is not needed here.

    apart   rollouts and training at the same time on the card
    shared  ``placement: shared``: they take turns

For each placement: trained sequences and tokens per second from the first version to the last, the trainer's tokens
per second within a step, seconds from a published version to its swap in the engine (median), and the most memory of the card
that was in use (``nvidia-smi``, all processes). ``ours`` and ``theirs`` are trained sequences per second of shared and apart;
``problems`` lists the deviations, and the exit code is then 1.

    python benchmarks/gpu_run.py [--steps 8] [--quick] [--device cpu]

On a CPU (``--quick --device cpu``) a small model tests the script; its speeds have no meaning then.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import yaml

from benchmarks._bench import ROOT, report
from recipes.quickstart.model import build
from services.common.telemetry.logs import LogEvent

LIMIT_S = 200.0
SIZES: dict[str, dict[str, Any]] = {
    "gpu": {"model": {"hidden_size": 1024, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128,
                      "intermediate_size": 3072, "context_length": 1024},
            "batch": 128, "slots": 256, "tokens": 256},
    "quick": {"model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
                        "intermediate_size": 128, "context_length": 256},
              "batch": 16, "slots": 32, "tokens": 32},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``memory_peak_gib``: of the whole card; ``trainer_peak_gib``: the trainer's own figure."""

    versions: int
    sequences_per_s: float
    trained_tokens_per_s: float
    trainer_tokens_per_s: float
    trainer_peak_gib: float
    publish_to_swap_s: float
    memory_peak_gib: float
    turns: int


def recipe(directory: Path, name: str, device: str, steps: int, size: dict[str, Any]) -> Path:
    """The recipe of one placement, as a file."""
    on_gpu = device == "cuda"
    gpus: dict[str, Any] = {"gpus": [0]} if on_gpu and name == "shared" else {}
    dtype = "bfloat16" if on_gpu else "float32"
    tree = {
        "extends": str(ROOT / "recipes" / "base.yaml"),
        "name": name,
        "placement": name,
        "run": {"id": name, "dir": str(directory / "runs"), "steps": steps, "seed": 1},
        "policies": {
            "model0": {
                "model": {"path": str(directory / "model"), "context_length": size["model"]["context_length"]},
                "algorithm": {"name": "m2po"},
                "optimizer": {"lr": 1.0e-5},
                "batch": {"size": size["batch"], "max_staleness": 1, "dynamic_sampling": False},
                "trainer": {"port": 0, "device": device, "compute_dtype": dtype, "checkpoint_every": 1000,
                            "gradient_checkpointing": False, "export_final": False, **gpus},
                "weights": {"publish_dtype": dtype, "port": 0, "keep_versions": 1},
            }
        },
        "workflow": {"name": "single_turn", "settings": {"reward": "benchmarks.shared_placement:parity"}},
        "data": {
            "train": {"generator": "recipes.quickstart.task:problems", "settings": {"split": "train"}, "id_field": "id"}
        },
        "sampling": {"temperature": 1.0, "max_new_tokens": size["tokens"]},
        "rollout": {"group_size": 8},
        "evaluation": {"at_start": False, "at_end": False, "every": 0},
        "orchestrator": {"port": 0},
        "inference": {"a": {"port": 0, "engine": "torch", "num_slots": size["slots"], "device": device, "dtype": dtype,
                            **gpus}},
        "envgateway": None,
    }  # fmt: skip
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@contextmanager
def memory_of_the_card(device: str) -> Iterator[list[float]]:
    """Samples of the card's memory in use, GiB, four in a second; none on a CPU."""
    found: list[float] = []
    ended = threading.Event()

    def sample() -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while not ended.wait(0.25):
            said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
            found.append(float(said) / 1024)

    thread = threading.Thread(target=sample, name="memory of the card", daemon=True)
    if device == "cuda":
        thread.start()
    try:
        yield found
    finally:
        ended.set()
        if device == "cuda":
            thread.join(20)


def play(directory: Path, name: str, device: str, steps: int, size: dict[str, Any]) -> Run:
    """Run one placement to its end. Raises ``RuntimeError`` with the end of the output."""
    path = recipe(directory, name, device, steps, size)
    log = directory / f"{name}.log"
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }
    with memory_of_the_card(device) as memory, log.open("w") as output:
        command = [sys.executable, "-m", "services.cli", "run", str(path)]
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            code: int | str = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)
            code = f"no end after {LIMIT_S:g} s"
    if code:
        raise RuntimeError(f"the run {name} ended with {code}:\n{log.read_text()[-4000:]}")
    run = directory / "runs" / name
    events = _rows(run / "logs" / "orchestrator.jsonl")
    published = {row["version"]: _seconds(row) for row in events if row.get("event") == "version.published"}
    updated = {
        row["version"]: _seconds(row)
        for row in _rows(run / "logs" / "inference-a.jsonl")
        if row.get("event") == LogEvent.ENGINE_UPDATED
    }
    told = [row for row in _rows(run / "metrics" / "orchestrator.jsonl") if row["kind"] == "training_step"]
    wall = max(published.values()) - min(published.values())
    trained = told[1:]  # the first step warms up, before its version is published
    return Run(
        versions=len(published) - 1,
        sequences_per_s=size["batch"] * len(trained) / wall,
        trained_tokens_per_s=sum(row["trainer/num_trained_tokens"] for row in trained) / wall,
        trainer_tokens_per_s=statistics.median(row["trainer/tokens_per_second"] for row in trained),
        trainer_peak_gib=max(row["trainer/memory_peak_gib"] for row in told),
        publish_to_swap_s=statistics.median(updated[v] - published[v] for v in published if v and v in updated),
        memory_peak_gib=max(memory, default=0.0),
        turns=sum(row.get("event") == "device.given" for row in events),
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def _seconds(row: dict[str, Any]) -> float:
    return datetime.fromisoformat(row["timestamp"]).timestamp()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="a small model and three steps")
    options = parser.parse_args()
    size = SIZES["quick" if options.quick else "gpu"]
    steps = 3 if options.quick else options.steps
    with tempfile.TemporaryDirectory(prefix="rollmill-gpu-run-") as made:
        directory = Path(made)
        build(directory / "model", 1, **size["model"])
        runs = {name: play(directory, name, options.device, steps, size) for name in ("apart", "shared")}
    problems = [
        f"{name} has published {run.versions} of {steps} versions"
        for name, run in runs.items()
        if run.versions != steps
    ]
    shared, apart = runs["shared"], runs["apart"]
    report(
        "gpu_run", shared.sequences_per_s, apart.sequences_per_s, shared.sequences_per_s / apart.sequences_per_s, None,
        unit="sequences/s", device=options.device, at=datetime.now(UTC).strftime("%Y-%m-%d"),
        **{name: asdict(run) for name, run in runs.items()}, problems=problems,
    )  # fmt: skip
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
