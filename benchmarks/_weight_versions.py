"""Synthetic weight versions of a transformer's shape: bf16 values, and from each version to the next about 1% changed.

Nine in ten changed elements move to the neighbouring bf16 value and the rest by two to four, as fp32 masters do that
are trained with a small learning rate. Shared by the benchmarks of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.common.weights.snapshot import Manifest, Snapshot, SnapshotWriter, TensorSpec

RUN, POLICY = "benchmark", "model0"
DENSITY = 0.01

_HIDDEN = 1024
_LAYER = {"q": 1, "k": 1, "v": 1, "o": 1, "gate": 4, "up": 4, "down": 4}  # in hidden x hidden
_BLOCK = 1 << 22  # values drawn; a large tensor repeats them


def model_specs(size_bytes: int) -> list[TensorSpec]:
    """An eighth of the bytes in the embedding, the rest in layers of matrices and norms."""
    matrix_bytes = 2 * _HIDDEN * _HIDDEN
    specs = [_spec("embed_tokens", size_bytes // 8 // (2 * _HIDDEN), _HIDDEN)]
    layers = max(1, round((size_bytes - specs[0].size_bytes) / (sum(_LAYER.values()) * matrix_bytes)))
    for layer in range(layers):
        specs += [_spec(f"layers.{layer}.{name}", width * _HIDDEN, _HIDDEN) for name, width in _LAYER.items()]
        specs.append(TensorSpec(name=f"layers.{layer}.norm.weight", dtype="bfloat16", shape=(_HIDDEN,)))
    return specs


def _spec(name: str, rows: int, columns: int) -> TensorSpec:
    return TensorSpec(name=f"{name}.weight", dtype="bfloat16", shape=(rows, columns))


class VersionMaker:
    """Writes one version after the other into sealed snapshot files."""

    def __init__(self, specs: Sequence[TensorSpec], directory: Path, seed: int, density: float = DENSITY) -> None:
        self.specs = specs
        self.size_bytes = sum(spec.size_bytes for spec in self.specs)
        self._directory = directory
        self._density = density
        self._rng = np.random.default_rng(seed)
        self._last: Snapshot | None = None

    def write(self) -> tuple[Path, Manifest]:
        """The next version, from 1 on. The publisher removes older files."""
        number = self._last.manifest.version + 1 if self._last is not None else 1
        writer = SnapshotWriter.create(
            run_id=RUN, policy=POLICY, version=number, specs=self.specs, directories=(self._directory,)
        )
        for entry in writer.tensors:
            bits = writer.bits(entry)
            if self._last is None:
                bits[:] = np.resize(self._draw(), len(bits))
            else:
                before = {tensor.name: tensor for tensor in self._last.manifest.tensors}[entry.name]
                bits[:] = self._last.bits(before)
                self._change(bits)
            del bits
        path, manifest = writer.path, writer.seal()
        self._last = Snapshot(path)
        return path, manifest

    def _draw(self) -> np.ndarray:
        values = self._rng.standard_normal(_BLOCK, dtype=np.float32) * np.float32(0.02)
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)

    def _change(self, bits: np.ndarray) -> None:
        positions = np.unique(self._rng.integers(0, len(bits), int(len(bits) * self._density)))
        sizes = np.where(self._rng.random(len(positions)) < 0.9, 1, self._rng.integers(2, 5, len(positions)))
        signs = self._rng.choice(np.array([-1, 1]), len(positions))
        bits[positions] += (sizes * signs).astype(np.int16).view(np.uint16)
