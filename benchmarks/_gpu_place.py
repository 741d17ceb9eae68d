"""The device that ``gpu_kit.py`` measures, its models, and the time of its kernels."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.rehearsal_8b import config_of
from services.cli.check.memory import GIB, KNOWN_SHAPES, ModelShape

Figures = Iterator[dict[str, Any]]
TINY = ModelShape(
    num_parameters=2_000_000, num_layers=2, hidden=256, intermediate=512, kv_width=128, vocabulary=1000, tied=True
)
QWEN3_4B = ModelShape(
    num_parameters=4_022_468_096, num_layers=36, hidden=2560, intermediate=9728, kv_width=1024, vocabulary=151_936,
    query_width=4096, tied=True,
)  # fmt: skip
GATHERS = re.compile(r"gather|index|embedding", re.IGNORECASE)
MARKS = ("FSDP::", "Optimizer.", "nccl:", "## ", "ProfilerStep")  # spans of other kernels
ATTENTION = re.compile(r"fmha|flash|attention|softmax", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Place:
    """The device, and whether shapes are small."""

    device: str

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    def size(self, large: int, small: int) -> int:
        return small if self.small else large

    def shape(self, name: str) -> ModelShape:
        return TINY if self.small else {**KNOWN_SHAPES, "Qwen3-4B": QWEN3_4B}[name]

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 3) -> float:
        """Median of a few calls, after one that warms up."""
        taken = []
        for _ in range(repeats + 1):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    def kernels(self, work: Callable[[], object]) -> tuple[float, dict[str, float]]:
        """Seconds in which the device computes, and seconds by name of the kernel."""
        if self.device == "cpu":
            work()
            return 0.0, {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            self.wait()
        events = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profile.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(MARKS)
        )
        busy, last, names = 0.0, 0.0, dict[str, float]()
        for start, end, name in events:
            busy += max(0.0, end - max(start, last))
            last = max(last, end)
            names[name[:70]] = names.get(name[:70], 0.0) + (end - start) / 1e6
        return busy / 1e6, dict(sorted(names.items(), key=lambda pair: -pair[1]))

    def model(self, shape: ModelShape, dtype: torch.dtype) -> Any:
        """Random weights, made on the device."""
        torch.manual_seed(0)
        config = config_of(shape)
        config.max_position_embeddings = 131_072
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)


def top(names: dict[str, float], count: int = 10) -> dict[str, float]:
    """Milliseconds of the kernels that take longest."""
    return {name: 1e3 * seconds for name, seconds in list(names.items())[:count]}


def share_of(pattern: re.Pattern[str], names: dict[str, float]) -> float:
    return sum(seconds for name, seconds in names.items() if pattern.search(name)) / (sum(names.values()) or 1.0)


def reserved(place: Place) -> float:
    return torch.cuda.max_memory_reserved() / GIB if place.device == "cuda" else 0.0


def release(place: Place) -> None:
    gc.collect()
    if place.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
