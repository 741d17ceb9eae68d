"""A decoding step of small models on a CPU: compiled code against torch, in one process.

Both decode the same rows at the same positions over the same cache, with plain sampling. The weights of both are the model's
own, and ``gap`` is the greatest distance of their log-probabilities. ``ratio`` is that of the quickstart's model at 64 rows;
``refresh`` is what a weight update adds to the swap. Best of several times, in turn, by CPU time of the thread.

    python benchmarks/decoding_step.py [--quick] [--position 100]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks._report import median_and_spread, report
from benchmarks._workload import MODELS
from benchmarks.engine_throughput import build_model
from extras.compiled import step as native_step
from services.inference.engine.torch.decoder import Decoder

ROWS = (1, 8, 24, 64)
CONTEXT = 256
PACKED_BYTES = native_step.PACKED_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some seconds")
    parser.add_argument("--position", type=int, default=100, help="tokens before the one of the step (default: 100)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    repeats = 5 if options.quick else 15
    measured: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name in MODELS:
            measured += _of_model(name, options.position, repeats)
    first = next(m for m in measured if (m["model"], m["rows"]) == ("quickstart", 64))
    left_out = {} if first["compiled"] else {"compiled": "there is no C compiler"}
    report(
        "decoding_step", first["ours"], first["theirs"], first["ratio"], first["spread"], unit="ms of CPU time per step",
        gap=max(m["gap"] for m in measured), position=options.position, steps=measured, left_out=left_out,
    )  # fmt: skip


def _of_model(name: str, position: int, repeats: int) -> list[dict[str, Any]]:
    model = build_model(name, 1)
    both = [_decoder(model, packed_bytes) for packed_bytes in (PACKED_BYTES, 0)]
    refresh = [min(_seconds(partial(_refresh, decoder)) for _ in range(8 * repeats)) * 1e3 for decoder in both]
    both[1].cache.kv.normal_(std=0.5)
    both[0].cache.kv.copy_(both[1].cache.kv)
    for decoder in both:
        rows = np.arange(max(ROWS))
        decoder.cache.own(rows, 0 * rows, np.full(len(rows), position + 1))
    found = []
    for rows in ROWS:
        steps = [Step(decoder, rows, position) for decoder in both]
        one, other = (step.logits().log_softmax(-1) for step in steps)
        times = [[min(_seconds(step) for _ in range(8)) * 1e3 for step in steps] for _ in range(repeats)]
        ratio, spread = median_and_spread([theirs / ours for ours, theirs in times])
        ours, theirs = (min(column) for column in zip(*times, strict=True))
        gap = float((one - other).abs().max())
        found.append(
            {
                "model": name, "rows": rows, "compiled": bool(both[0].extends_up_to), "ours": ours, "theirs": theirs,
                "ratio": ratio, "spread": spread, "gap": gap, "refresh_ours": refresh[0], "refresh_theirs": refresh[1],
            }
        )  # fmt: skip
        print(
            f"{name:<10} {rows:>3} rows  compiled {ours:7.3f}  torch {theirs:7.3f} ms  ratio {ratio:.2f} ±{spread:.0%}"
            f"  gap {gap:.0e}"
        )
    return found


class Step:
    """One step of a decoder over its leading slots."""

    def __init__(self, decoder: Decoder, rows: int, position: int) -> None:
        self._decoder = decoder
        self._slots, self._positions = np.arange(rows), np.full(rows, position)
        self._uniform = np.linspace(0, 0.999, rows)

    def logits(self) -> torch.Tensor:
        return self._decoder.decode(self._slots, self._slots, self._positions)

    def __call__(self) -> None:
        self._decoder.draw(self.logits(), self._uniform)


def _decoder(model: Any, packed_bytes: int) -> Decoder:
    native_step.PACKED_BYTES = packed_bytes
    return Decoder(copy.deepcopy(model), num_slots=max(ROWS), context_length=CONTEXT)


def _refresh(decoder: Decoder) -> None:
    decoder.blocks.refresh()
    if decoder._fast is not None:
        decoder._fast.refresh()


def _seconds(work: Callable[[], Any]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


if __name__ == "__main__":
    main()
