"""The rehearsal of weights has the shapes of the true model, and its table adds up."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from benchmarks._rehearsal_weights import SHAPE, VERSION_BYTES, layer_specs, link_row  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))


def test_a_layer_and_the_embedding_have_the_sizes_of_the_true_model() -> None:
    sizes = {spec.name: math.prod(spec.shape) for spec in layer_specs()}
    embedding = sizes.pop("model.embed_tokens.weight")
    assert SHAPE.num_layers * sum(sizes.values()) + 2 * embedding == pytest.approx(SHAPE.num_parameters, rel=1e-4)


@pytest.mark.parametrize("percent", [17])
def test_a_row_adds_up(percent: int) -> None:
    row = link_row(percent, rows=64)
    assert 0.7 * percent < 100 * row["changed"] < 1.3 * percent
    # The cost of decoding has the digest in it; 0.01 for rounding.
    assert row["delta_s"] == pytest.approx(
        row["encode_s"] + row["wire_s"] + row["decode_s"] + row["verify_s"], rel=0.01
    )
    assert row["full_s"] == pytest.approx(VERSION_BYTES / (25e9 / 8) + row["verify_s"])
