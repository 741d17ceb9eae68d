"""A digest names its algorithm, covers bytes and shapes, and a version has one algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import CorruptDataError
from services.common.weights.snapshot import (
    DigestAlgorithm,
    TensorEntry,
    TensorSpec,
    algorithm_of,
    digest_parts,
    lay_out,
    tensor_digest,
    version_digest,
)

ALGORITHMS: list[DigestAlgorithm] = ["xxh3-128", "blake3"]
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


def entry(name: str, algorithm: DigestAlgorithm, data: bytes = b"") -> TensorEntry:
    return TensorEntry(
        name=name, dtype="bfloat16", shape=(2, 3), offset=0, length=12, digest=tensor_digest(data, algorithm)
    )


@algorithms
def test_a_digest_names_its_algorithm_and_has_the_length_of_its_dummy(algorithm: DigestAlgorithm) -> None:
    digest = tensor_digest(b"weights", algorithm)
    assert algorithm_of(digest) == algorithm
    assert len(digest) == len(lay_out([TensorSpec(name="w", dtype="bfloat16", shape=(1,))], algorithm)[0].digest)
    assert digest != tensor_digest(b"weighty", algorithm)


def test_known_digests_do_not_change() -> None:
    assert tensor_digest(b"") == "xxh3-128:99aa06d3014798d86001c324468d497f"
    assert tensor_digest(b"", "blake3") == "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


@given(st.lists(st.binary(max_size=50), max_size=5), st.sampled_from(ALGORITHMS))
def test_parts_digest_as_their_whole(parts: list[bytes], algorithm: DigestAlgorithm) -> None:
    assert digest_parts(parts, algorithm) == tensor_digest(b"".join(parts), algorithm)


@algorithms
def test_a_version_has_the_algorithm_of_its_tensors_and_no_order(algorithm: DigestAlgorithm) -> None:
    entries = [entry("a", algorithm), entry("b", algorithm, b"x")]
    digest = version_digest(entries)
    assert algorithm_of(digest) == algorithm
    assert version_digest(reversed(entries)) == digest
    for changed in (
        replace(entries[0], name="c"),
        replace(entries[0], dtype="float16"),
        replace(entries[0], shape=(3, 2)),
        replace(entries[0], digest=tensor_digest(b"y", algorithm)),
    ):
        assert version_digest([changed, entries[1]]) != digest
    assert version_digest([replace(entries[0], offset=64), entries[1]]) == digest, "where it lies is nobody's concern"


def test_a_version_of_two_algorithms_is_refused() -> None:
    with pytest.raises(CorruptDataError, match="several algorithms"):
        version_digest([entry("a", "xxh3-128"), entry("b", "blake3")])


@pytest.mark.parametrize(
    "text", ["", "md5:00", "xxh3-128:12", "blake3:" + "0" * 32, "xxh3-128:" + "g" * 32, "xxh3-128:" + "A" * 32]
)
def test_a_malformed_digest_is_refused(text: str) -> None:
    with pytest.raises(CorruptDataError):
        algorithm_of(text)
    with pytest.raises(CorruptDataError):
        version_digest([replace(entry("a", "xxh3-128"), digest=text)])
