"""A digest names its algorithm, covers bytes and shapes, and a version has one algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import CorruptDataError
from services.common.pb import weights_pb2
from services.common.weights.snapshot import (
    AdapterIdentity,
    BaseVersion,
    DigestAlgorithm,
    Encoding,
    Manifest,
    Payload,
    PayloadRequest,
    TensorEntry,
    TensorSpec,
    algorithm_of,
    digest_parts,
    lay_out,
    tensor_digest,
    version_digest,
)
from services.common.wire import payload_from_proto, read, write

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


# --- manifests on the wire


ADAPTER = AdapterIdentity(rank=8, alpha=12.5, targets=("k_proj", "q_proj"), base="xxh3-128:" + "0" * 32)


def payload(encoding: Encoding, adapter: AdapterIdentity | None = None) -> Payload:
    tensors = lay_out([TensorSpec(name="w", dtype="bfloat16", shape=(3, 5))])
    manifest = Manifest.of(run_id="r", policy="p", version=2, tensors=tensors, adapter=adapter)
    base = BaseVersion(number=1, digest="xxh3-128:1") if encoding is Encoding.DELTA else None
    return Payload(payload_id="p:2", encoding=encoding, size_bytes=30, target=manifest, base=base, encode_s=0.5)


@pytest.mark.parametrize("adapter", [None, ADAPTER])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_a_payload_crosses_the_wire_unchanged(encoding: Encoding, adapter: AdapterIdentity | None) -> None:
    sent = payload(encoding, adapter)
    assert payload_from_proto(write(sent, weights_pb2.Payload())) == sent


def test_a_version_that_lost_or_changed_its_adapter_on_the_way_is_refused() -> None:
    for change in ("adapter", "alpha", "base_digest"):
        proto = write(payload(Encoding.FULL, ADAPTER), weights_pb2.Payload())
        (proto.target if change == "adapter" else proto.target.adapter).ClearField(change)  # type: ignore[arg-type]
        with pytest.raises(CorruptDataError, match=r"names digest .*, its tensors make"):
            payload_from_proto(proto)


@settings(max_examples=30, deadline=None)
@given(
    rank=st.integers(1, 1 << 20),
    alpha=st.floats(min_value=1e-6, max_value=1e6),
    targets=st.lists(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), min_size=1, max_size=5, unique=True),
)
def test_every_part_of_an_adapter_changes_the_digest(rank: int, alpha: float, targets: list[str]) -> None:
    one = AdapterIdentity(rank=rank, alpha=alpha, targets=tuple(sorted(targets)), base=ADAPTER.base)
    others = [
        replace(one, rank=rank + 1),
        replace(one, alpha=alpha * 2),
        replace(one, targets=(*one.targets, "zz")),
        replace(one, base=one.base[:-1] + "1"),
        None,
    ]
    digests = {version_digest([], each) for each in (one, *others)}
    assert len(digests) == 1 + len(others)


@pytest.mark.parametrize("encoding", [0, 9])
def test_an_unknown_encoding_is_refused(encoding: weights_pb2.WeightEncoding) -> None:
    proto = write(payload(Encoding.FULL), weights_pb2.Payload())
    proto.encoding = encoding
    with pytest.raises(CorruptDataError, match="unknown here"):
        payload_from_proto(proto)


@pytest.mark.parametrize("wait_s", [0.0, 2.5])
def test_a_request_crosses_the_wire_unchanged(wait_s: float) -> None:
    asked = PayloadRequest(
        run_id="r",
        policy="p",
        version=7,
        base=BaseVersion(number=0, digest="xxh3-128:1"),
        wait_s=wait_s,
        transports=("mapped", "grpc"),
        host="here",
    )
    message = write(asked, weights_pb2.GetManifestRequest())
    message.transports.append(9)  # type: ignore[arg-type]
    assert read(PayloadRequest, message) == asked, "and a way that this end does not know is left out"
