"""The manifest of a payload crosses the wire unchanged, and one that this end cannot read is refused."""

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
    Encoding,
    Manifest,
    Payload,
    PayloadNotReadyError,
    PayloadRequest,
    TensorSpec,
    lay_out,
    version_digest,
)
from services.common.wire import (
    not_ready_from_proto,
    not_ready_to_proto,
    payload_from_proto,
    payload_request_from_proto,
    payload_request_to_proto,
    payload_to_proto,
)

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
    assert payload_from_proto(payload_to_proto(sent)) == sent


def test_a_version_that_lost_or_changed_its_adapter_on_the_way_is_refused() -> None:
    for change in ("adapter", "alpha", "base_digest"):
        proto = payload_to_proto(payload(Encoding.FULL, ADAPTER))
        (proto if change == "adapter" else proto.adapter).ClearField(change)  # type: ignore[arg-type]
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
    proto = payload_to_proto(payload(Encoding.FULL))
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
    )
    assert payload_request_from_proto(payload_request_to_proto(asked)) == asked


@pytest.mark.parametrize("started", [True, False])
def test_not_ready_crosses_the_wire(started: bool) -> None:
    sent = PayloadNotReadyError("the delta", started=started, size_bytes=1 << 34)
    read = not_ready_from_proto(not_ready_to_proto(sent), "the delta")
    assert read is not None and str(read) == str(sent)
    assert (read.started, read.size_bytes) == (started, 1 << 34)
    assert not_ready_from_proto(payload_to_proto(payload(Encoding.FULL)), "x") is None
