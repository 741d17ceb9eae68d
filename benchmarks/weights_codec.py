"""The delta codec: bits per changed element and speed per core, against other encodings.

Sizes on two kinds of version pairs in bf16:

- synthetic: float32 master weights of a transformer's shape (normal, std 0.02), updates of about 2.3e-7 per element (an
  Adam step at learning rate 1e-6 moves far less than one step to the neighbouring bf16 value), cast before and after;
- trained: a small Qwen3 with random initial weights, really trained with AdamW at learning rate 1e-6 until its moments
  are warm; the pair is as many updates apart as change 0.8% of the elements.

Against: 32-bit index and bf16 value (48 bits), and the dense XOR of both versions through zstd-1. The bound is the
entropy of an independent mask plus that of the steps; the context bound knows the old value's exponent (ADR 42).

Speeds on one core over 256 MiB at 1% (64 MiB with --quick), in GB of model per second: diff and encode, decode and
apply in place; each also as a share of memcpy in the same run. ``encode_gbs_S`` and ``decode_gbs_S`` are the same at S% changed
elements, in CPU seconds: float32 masters change 17% of the bf16 elements in four updates at learning rate 5e-6. Memory is
kept as the services keep it.

    python benchmarks/weights_codec.py [--quick] [--seed 0]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import zstandard

from benchmarks._bench import median_and_spread, report
from services.common.system.machine import keep_freed_memory
from services.common.weights.codec import decode_tensor, encode_tensor
from services.common.weights.snapshot import Bits, named_weights, zigzagged_steps

DTYPE = "bfloat16"
MIB = 1 << 20
Version = list[Bits]  # one array per tensor

_MASTER_STD = np.float32(0.02)
_UPDATE_STD = np.float32(2.3e-7)
_SHARE_STDS = {1: _UPDATE_STD, 5: np.float32(1.7e-6), 17: np.float32(7.6e-6)}  # by percent changed
_TENSOR = 16 * MIB  # elements of one synthetic tensor

# Matrices of about a million elements, as the smallest models in use have them, but few: 14 M parameters train in seconds.
TRAINED = {
    "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 2048, "vocab_size": 4096,
}  # fmt: skip


def to_bf16(values: np.ndarray) -> Bits:
    """Rounded to the nearest, ties to even."""
    raw = values.view(np.uint32)
    return ((raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


class Synthetic:
    """fp32 masters and their casts, version by version."""

    def __init__(self, num_elements: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        sizes = [min(_TENSOR, num_elements - start) for start in range(0, num_elements, _TENSOR)]
        self._masters = [self._rng.standard_normal(size, dtype=np.float32) * _MASTER_STD for size in sizes]

    def cast(self) -> Version:
        return [to_bf16(master) for master in self._masters]

    def update(self, std: np.float32 = _UPDATE_STD) -> None:
        for master in self._masters:
            master += self._rng.standard_normal(len(master), dtype=np.float32) * std


def trained_pair(seed: int, warm_up: int) -> tuple[Version, Version, int]:
    """Two versions of a model in training, and how many updates lie between them."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(Qwen3Config(tie_word_embeddings=True, **TRAINED))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.999), weight_decay=0.01)

    def train() -> None:
        # Sequences with structure to learn: each is a few tokens, repeated.
        tokens = torch.randint(0, 512, (2, 8)).repeat(1, 4)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def cast() -> Version:
        return [to_bf16(weight.contiguous().view(-1).numpy()) for weight in named_weights(model).values()]

    for _ in range(warm_up):
        train()
    old, updates = cast(), 0
    while True:
        train()
        updates += 1
        new = cast()
        if changed_share(old, new) >= 0.008:
            return old, new, updates


def changed_share(old: Version, new: Version) -> float:
    return num_changes(old, new) / sum(map(len, old))


def num_changes(old: Version, new: Version) -> int:
    return sum(int(np.count_nonzero(a != b)) for a, b in zip(old, new, strict=True))


def ours(old: Version, new: Version) -> list[bytes]:
    return [encode_tensor(a, b, DTYPE) for a, b in zip(old, new, strict=True)]


def applied(old: Version, coded: list[bytes]) -> Version:
    target = [bits.copy() for bits in old]
    apply(target, coded)
    return target


def apply(target: Version, coded: list[bytes]) -> None:
    for bits, data in zip(target, coded, strict=True):
        for change in decode_tensor(bits, data, DTYPE):
            change.write_to(bits)


def plain_bytes(old: Version, new: Version) -> int:
    """32-bit index and value."""
    return 6 * num_changes(old, new)


def xor_zstd_bytes(old: Version, new: Version) -> int:
    compressor = zstandard.ZstdCompressor(level=1)
    return sum(len(compressor.compress((a ^ b).tobytes())) for a, b in zip(old, new, strict=True))


def bounds(old: Version, new: Version) -> tuple[float, float]:
    """Bits per change: mask and steps independent of everything, and given the old exponent."""
    before, after = np.concatenate(old), np.concatenate(new)
    changed = before != after
    steps = zigzagged_steps(before[changed], after[changed], is_float=True)
    count = int(changed.sum())
    independent = _mask_entropy(len(before), count) / count + _entropy(steps)
    exponents = ((before >> 7) & 0xFF).astype(np.uint8)
    population, hits = (np.bincount(e, minlength=256) for e in (exponents, exponents[changed]))
    given = sum(_mask_entropy(int(n), int(k)) for n, k in zip(population, hits, strict=True))
    of_changed = exponents[changed]
    given += sum(_entropy(steps[of_changed == e]) * int(hits[e]) for e in np.flatnonzero(hits))
    return independent, given / count


def _mask_entropy(members: int, hits: int) -> float:
    if not 0 < hits < members:
        return 0.0
    share = hits / members
    return float(-members * (share * np.log2(share) + (1 - share) * np.log2(1 - share)))


def _entropy(values: Bits) -> float:
    _, counts = np.unique(values, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def sizes(name: str, old: Version, new: Version) -> dict[str, float]:
    count = num_changes(old, new)
    coded = ours(old, new)
    assert all(np.array_equal(a, b) for a, b in zip(applied(old, coded), new, strict=True)), "not lossless"
    found: dict[str, float] = {"share": count / sum(map(len, old)), "bits": 8 * sum(map(len, coded)) / count}
    found["plain_bits"] = 8 * plain_bytes(old, new) / count
    found["xor_zstd_bits"] = 8 * xor_zstd_bytes(old, new) / count
    found["bound_bits"], found["context_bound_bits"] = bounds(old, new)
    print(
        f"{name:10s} {found['share']:.2%} changed: {found['bits']:.2f}; "
        f"index + value {found['plain_bits']:.0f}, XOR + zstd-1 {found['xor_zstd_bits']:.1f}; "
        f"bound {found['bound_bits']:.2f}, with context {found['context_bound_bits']:.2f} bits per change",
        flush=True,
    )
    return found


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def speeds(old: Version, new: Version, repetitions: int) -> Iterator[tuple[str, float, float, float]]:
    """(name, GB/s, share of memcpy, spread); arms and memcpy in turns."""
    size = sum(bits.nbytes for bits in old) / 1e9
    target = [bits.copy() for bits in old]
    coded = ours(old, new)

    def copy() -> None:
        for bits, source in zip(target, old, strict=True):
            np.copyto(bits, source)

    times: dict[str, list[float]] = {"memcpy": [], "encode": [], "decode": []}
    for _ in range(repetitions):
        times["memcpy"].append(timed(copy))
        times["encode"].append(timed(partial(ours, old, new)))
        copy()
        times["decode"].append(timed(partial(apply, target, coded)))
    memcpy = statistics.median(times["memcpy"])
    for name, measured in times.items():
        seconds, spread = median_and_spread(measured)
        yield name, size / seconds, memcpy / seconds, spread


def speeds_by_share(num_elements: int, seed: int, repetitions: int) -> dict[str, float]:
    """Best speeds in GB of bf16 per CPU second, by percent of changed elements; the arms in turns."""
    found: dict[str, float] = {}
    for percent, std in _SHARE_STDS.items():
        masters = Synthetic(num_elements, seed)
        old = masters.cast()
        masters.update(std)
        new = masters.cast()
        coded, target = ours(old, new), [bits.copy() for bits in old]
        encode_s, decode_s = [], []
        for _ in range(repetitions):
            encode_s.append(cpu_seconds(partial(ours, old, new)))
            for bits, source in zip(target, old, strict=True):
                np.copyto(bits, source)
            decode_s.append(cpu_seconds(partial(apply, target, coded)))
        assert all(np.array_equal(a, b) for a, b in zip(target, new, strict=True)), "not lossless"
        size = sum(bits.nbytes for bits in old) / 1e9
        count = num_changes(old, new)
        found[f"share_{percent}"] = changed_share(old, new)
        found[f"bits_{percent}"] = 8 * sum(map(len, coded)) / count
        found[f"encode_gbs_{percent}"], found[f"decode_gbs_{percent}"] = size / min(encode_s), size / min(decode_s)
        print(
            f"{found[f'share_{percent}']:6.2%} changed: {found[f'bits_{percent}']:.2f} bits per change, "
            f"encode {size / min(encode_s):.2f} GB/s, decode {size / min(decode_s):.2f} GB/s",
            flush=True,
        )
    return found


def cpu_seconds(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MiB instead of 256, fewer repetitions; under a minute")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory(one_arena=True)
    num_elements, repetitions, warm_up = (32 * MIB, 5, 20) if arguments.quick else (128 * MIB, 9, 60)
    masters = Synthetic(num_elements, arguments.seed)
    old = masters.cast()
    masters.update()
    new = masters.cast()
    synthetic = sizes("synthetic", old, new)
    *pair, updates = trained_pair(arguments.seed, warm_up)
    trained = sizes("trained", *pair)
    print(f"           the trained pair lies {updates} update(s) apart, after {warm_up} of warm-up", flush=True)
    found: dict[str, Any] = {}
    for name, speed, share, spread in speeds(old, new, repetitions):
        found |= {f"{name}_gb_s": speed, f"{name}_share": share, f"{name}_spread": spread}
        print(f"{name:13s} {speed:6.2f} GB/s  {share:6.1%} of memcpy  ±{spread:.0%}", flush=True)
    found |= speeds_by_share(num_elements // 2, arguments.seed, repetitions)
    report(
        "weights_codec",
        synthetic["bits"],
        synthetic["plain_bits"],
        synthetic["plain_bits"] / synthetic["bits"],
        0.0,
        **synthetic,
        **{f"trained_{name}": value for name, value in trained.items()},
        fast_bits=synthetic["bits"],
        trained_updates=updates,
        **found,
    )


if __name__ == "__main__":
    main()
