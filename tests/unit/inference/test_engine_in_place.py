"""Changing weights in place gives exactly the model of the whole version, for all types."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.weights.codec import CHUNK_ELEMENTS, decode_tensor, encode_tensor
from services.common.weights.snapshot import Bits
from services.inference.engine.base import WeightUpdate
from services.inference.engine.torch.decoder import prepare

SIGNED = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}


def bits_of(tensor: torch.Tensor, dtype: str) -> Bits:
    kind = np.uint32 if dtype == "float32" else np.uint16
    bits: Bits = tensor.to(getattr(torch, dtype)).contiguous().view(-1).view(SIGNED[dtype]).numpy().view(kind).copy()
    return bits


@pytest.mark.parametrize("own", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("published", ["float32", "bfloat16", "float16"])
@settings(max_examples=15, deadline=None)
@given(share=st.sampled_from([0.0, 0.01, 0.3, 1.0]), seed=st.integers(0, 99))
def test_changes_in_place_equal_the_whole_tensor(published: str, own: str, share: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    old = torch.randn(40, 30, generator=draw).to(getattr(torch, published))
    step = torch.randn(40, 30, generator=draw) * (torch.rand(40, 30, generator=draw) < share)
    new = (old.float() + step).to(getattr(torch, published))
    coded = encode_tensor(bits_of(old, published), bits_of(new, published), published)
    changes = list(decode_tensor(bits_of(old, published), coded, published))
    in_place, whole = ({"w": old.to(getattr(torch, own))} for _ in range(2))
    prepare(WeightUpdate(version=1, changes={"w": changes}, dtype=published, complete=False), in_place).apply()
    prepare(WeightUpdate.full({"w": new}, 1), whole).apply()
    assert torch.equal(in_place["w"], whole["w"])


def test_preparing_changes_of_the_models_own_type_copies_nothing() -> None:
    size = 4 * CHUNK_ELEMENTS
    old = np.zeros(size, np.uint16)
    new = old.copy()
    new[::50] += 1
    changes = list(decode_tensor(old, encode_tensor(old, new, "bfloat16"), "bfloat16"))
    weights = {"w": torch.zeros(size, dtype=torch.bfloat16)}
    tracemalloc.start()
    try:
        prepared = prepare(WeightUpdate(version=1, changes={"w": changes}, dtype="bfloat16", complete=False), weights)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < sum(change.size_bytes for change in changes) / 10
    prepared.apply()
    assert np.array_equal(bits_of(weights["w"], "bfloat16"), new)
