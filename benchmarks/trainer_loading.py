"""Memory and time of a rank that loads a model: by shards against whole, then sharded.

Both start from the same checkpoint in bfloat16 and end with the same float32 shards. ``theirs`` is the way in which
every rank would do otherwise: transformers' ``from_pretrained``, then FSDP2's ``fully_shard``, which gives back all but
the shard. Memory is the largest growth of the process (resident, the mapped checkpoint included), of the rank with the
largest one.

    python benchmarks/trainer_loading.py [--quick] [--ranks 3]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks._report import median_and_spread, report

MIB = 1 << 20
TIMEOUT_S = 120


def high_water() -> int:
    """Most bytes that this process ever had resident."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def one_rank(way: str, small: Path, path: Path) -> None:
    """Load, and print time and memory; a small model goes first, so that imports and pools are not counted."""
    from services.common.text.chat import load_model
    from services.trainer.model.policy_model import build_policy_model, load_policy_model
    from services.trainer.ranks import init_ranks, leave_ranks

    torch.set_num_threads(1)
    ranks = init_ranks(timeout_s=TIMEOUT_S, device="cpu")

    def load(directory: Path) -> object:
        if way == "ours":
            return load_policy_model(directory, ranks)
        return build_policy_model(load_model(directory), ranks)

    kept = [load(small)]
    before, began = high_water(), time.perf_counter()
    kept.append(load(path))
    print(json.dumps({"peak": high_water() - before, "seconds": time.perf_counter() - began}), flush=True)
    leave_ranks()
    os._exit(0)  # gloo's threads do not bear the interpreter's end


def all_ranks(way: str, num_ranks: int, small: Path, path: Path) -> tuple[float, float]:
    """Bytes of the rank that took most, and seconds until the last was done."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", way, str(small), str(path)],
            env={**os.environ, **shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    said: list[dict[str, Any]] = []
    try:
        for process in processes:
            said.append(json.loads(process.communicate(timeout=TIMEOUT_S)[0].splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return max(one["peak"] for one in said), max(one["seconds"] for one in said)


def save(directory: Path, hidden: int, layers: int) -> int:
    """A Qwen3 with random weights in bfloat16; its parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine")
    parser.add_argument("--quick", action="store_true", help="a smaller model, one repetition")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollmill-loading-") as directory:
        small, path = Path(directory) / "small", Path(directory) / "model"
        save(small, 64, 2)
        num_parameters = save(path, *((512, 8) if options.quick else (1024, 12)))
        measured: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
        for _ in range(1 if options.quick else 3):
            for way, results in measured.items():
                results.append(all_ranks(way, options.ranks, small, path))
    peaks = {way: median_and_spread([peak / MIB for peak, _ in results]) for way, results in measured.items()}
    seconds = {way: median_and_spread([s for _, s in results])[0] for way, results in measured.items()}
    report(
        "trainer_loading", ours=peaks["ours"][0], theirs=peaks["theirs"][0],
        ratio=peaks["ours"][0] / peaks["theirs"][0], spread=max(spread for _, spread in peaks.values()),
        unit="MiB at the peak of one rank", ranks=options.ranks, million_parameters=num_parameters / 1e6,
        float32_mib=num_parameters * 4 / MIB, seconds=seconds,
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        one_rank(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    main()
