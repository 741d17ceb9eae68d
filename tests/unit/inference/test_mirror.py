"""The mirror always has one complete version, after any failure of a write and for concurrent readers."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from services.common.errors import CorruptDataError, ModelMismatchError, VersionUnavailableError
from services.common.weights.codec import CHUNK_ELEMENTS, ChunkChange, encode_tensor
from services.common.weights.snapshot import (
    ALIGNMENT,
    AdapterIdentity,
    BaseVersion,
    Bits,
    DigestAlgorithm,
    Encoding,
    Manifest,
    Payload,
    TensorSpec,
    lay_out,
    tensor_digest,
)
from services.inference.weights.fetch import ByteRange, Incoming, receive_buffer
from services.inference.weights.mirror import Mirror

Version = dict[str, Bits]

SIZES = {"a": CHUNK_ELEMENTS + 100, "b": 64, "c": 1}


def make_version(seed: int) -> Version:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 1 << 16, size, dtype=np.uint16) for name, size in SIZES.items()}


def changed(version: Version, seed: int) -> Version:
    """Tensor ``b`` stays; one in a hundred of the others moves by one."""
    rng = np.random.default_rng(seed)
    new = {name: bits.copy() for name, bits in version.items()}
    for name in ("a", "c"):
        new[name][rng.random(len(new[name])) < 0.01] += 1
    new["c"] += 1
    return new


def manifest_of(version: Version, number: int, algorithm: DigestAlgorithm = "xxh3-128") -> Manifest:
    specs = [TensorSpec(name=name, dtype="bfloat16", shape=(len(bits),)) for name, bits in version.items()]
    entries = [replace(entry, digest=tensor_digest(version[entry.name], algorithm)) for entry in lay_out(specs)]
    return Manifest.of(run_id="r", policy="p", version=number, tensors=entries)


def full(version: Version, number: int, algorithm: DigestAlgorithm = "xxh3-128") -> tuple[Payload, memoryview]:
    manifest = manifest_of(version, number, algorithm)
    data = receive_buffer(manifest.size_bytes)
    for entry in manifest.tensors:
        data[entry.offset : entry.offset + entry.length] = version[entry.name].tobytes()
    return Payload(payload_id="f", encoding=Encoding.FULL, size_bytes=len(data), target=manifest), data


def delta(
    old: Version, new: Version, number: int, algorithm: DigestAlgorithm = "xxh3-128"
) -> tuple[Payload, memoryview]:
    base, target = manifest_of(old, number - 1, algorithm), manifest_of(new, number, algorithm)
    parts, entries, offset = [], [], 0
    for entry in target.tensors:
        part = encode_tensor(old[entry.name], new[entry.name], entry.dtype)
        entries.append(replace(entry, offset=offset, length=len(part)))
        parts.append(part)
        offset += len(part)
    payload = Payload(
        payload_id="d",
        encoding=Encoding.DELTA,
        size_bytes=offset,
        target=replace(target, tensors=tuple(entries)),
        base=BaseVersion(number=base.version, digest=base.digest),
    )
    return payload, memoryview(b"".join(parts))


def take(mirror: Mirror, payload: Payload, data: memoryview, *, borrowed: bool = False) -> None:
    mirror.write(mirror.verify(payload, data, borrowed=borrowed))


def held(mirror: Mirror) -> Version:
    return {name: np.array(bits) for name, bits in mirror.host_arrays().items()}


def equal(left: Version, right: Version) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3"])
def test_a_snapshot_and_deltas_after_it_give_each_version_bit_for_bit(
    algorithm: DigestAlgorithm,
) -> None:
    mirror, version = Mirror("p"), make_version(0)
    take(mirror, *full(version, 0, algorithm))
    for number in range(1, 4):
        new = changed(version, number)
        take(mirror, *delta(version, new, number, algorithm))
        assert equal(held(mirror), new)
        assert mirror.base == BaseVersion(number=number, digest=manifest_of(new, number, algorithm).digest)
        version = new


def test_memory_that_others_share_is_never_written() -> None:
    mirror, first = Mirror("p"), make_version(0)
    payload, data = full(first, 0)
    before = bytes(data)
    take(mirror, payload, data, borrowed=True)
    second = changed(first, 1)
    take(mirror, *delta(first, second, 1))
    assert equal(held(mirror), second) and bytes(data) == before


def test_a_lease_keeps_its_version_while_the_next_is_written() -> None:
    mirror, first = Mirror("p"), make_version(0)
    take(mirror, *full(first, 0))
    second = changed(first, 1)
    manifest, bits = mirror.lease()
    take(mirror, *delta(first, second, 1))
    assert equal(dict(bits), first) and manifest.version == 0
    mirror.release()
    assert equal(held(mirror), second)
    third = changed(second, 2)
    before = mirror.host_arrays()["a"]
    take(mirror, *delta(second, third, 2))
    assert np.shares_memory(before, mirror.host_arrays()["a"]), "without a lease the array is written in place"


@pytest.mark.parametrize(
    "damage", ["values", "digest", "base", "unchanged", "missing", "short", "type", "shape", "before", "backwards"]
)
def test_whatever_is_wrong_with_a_delta_the_mirror_stays_as_it_is(damage: str) -> None:
    mirror, first = Mirror("p"), make_version(0)
    take(mirror, *full(first, 0))
    second = changed(first, 1)
    payload, data = delta(first, second, 1)
    entries = {entry.name: entry for entry in payload.target.tensors}
    if damage == "values":
        data = delta(first, changed(first, 9), 1)[1]
    elif damage == "digest":
        entries["a"] = replace(entries["a"], digest=tensor_digest(first["a"]))
    elif damage == "base":
        payload = replace(payload, base=BaseVersion(number=7, digest="xxh3-128:" + "0" * 32))
    elif damage == "unchanged":
        entries["b"] = replace(entries["b"], digest=tensor_digest(second["a"]))
    elif damage == "missing":
        entries["z"] = replace(entries.pop("b"), name="z")
    elif damage == "short":
        data = data[:-3]
    elif damage == "type":
        entries["a"] = replace(entries["a"], dtype="float16")
    elif damage == "shape":
        entries["a"] = replace(entries["a"], shape=(2, SIZES["a"] // 2))
    elif damage == "before":
        entries["c"] = replace(entries["c"], offset=-1)
    elif damage == "backwards":
        entries["c"] = replace(entries["c"], length=-1)
    payload = replace(payload, target=replace(payload.target, tensors=tuple(entries.values())))
    with pytest.raises(CorruptDataError):
        mirror.verify(payload, data)
    assert equal(held(mirror), first) and mirror.base is not None and mirror.base.number == 0


@pytest.mark.parametrize("damage", ["values", "short", "before", "length", "overlap"])
def test_whatever_is_wrong_with_a_snapshot_the_mirror_stays_as_it_is(damage: str) -> None:
    mirror, first = Mirror("p"), make_version(0)
    take(mirror, *full(first, 0))
    second = changed(first, 1)
    second["d"] = second["b"].copy()  # a digest does not tell these two apart
    payload, data = full(second, 1)
    entries = {entry.name: entry for entry in payload.target.tensors}
    if damage == "values":
        data[entries["b"].offset] ^= 1
    elif damage == "short":
        data = data[:-1]
    elif damage == "before":
        entries["c"] = replace(entries["c"], offset=-2)
    elif damage == "length":
        entries["c"] = replace(entries["c"], length=0)
    elif damage == "overlap":
        entries["d"] = replace(entries["d"], offset=entries["b"].offset)
    payload = replace(payload, target=replace(payload.target, tensors=tuple(entries.values())))
    with pytest.raises(CorruptDataError):
        mirror.verify(payload, data)
    assert equal(held(mirror), first) and mirror.base is not None and mirror.base.number == 0


def test_a_delta_takes_no_more_memory_than_its_changes_and_two_tensors() -> None:
    rng = np.random.default_rng(0)
    sizes = [3 * CHUNK_ELEMENTS, *[CHUNK_ELEMENTS] * 12]
    first = {str(number): rng.integers(0, 1 << 14, size, dtype=np.uint16) for number, size in enumerate(sizes)}
    second = {name: bits + (rng.random(len(bits)) < 0.01) for name, bits in first.items()}
    mirror = Mirror("p")
    take(mirror, *full(first, 0))
    payload, data = delta(first, second, 1)
    tracemalloc.start()
    try:
        verified = mirror.verify(payload, data)
        decoded = sum(part.size_bytes for parts in verified.changes.values() for part in parts)
        mirror.write(verified)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert equal(held(mirror), second)
    assert peak <= decoded + 2 * first["0"].nbytes


def test_a_write_that_is_interrupted_leaves_it_dirty_and_only_a_snapshot_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mirror, first = Mirror("p"), make_version(0)
    take(mirror, *full(first, 0))
    second = changed(first, 1)
    payload, data = delta(first, second, 1)
    verified = mirror.verify(payload, data)

    def killed(self: ChunkChange, target: Bits) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(ChunkChange, "write_to", killed)
        with pytest.raises(KeyboardInterrupt):
            mirror.write(verified)
    assert mirror.dirty and mirror.base is None
    with pytest.raises(CorruptDataError, match="cannot be applied"):
        mirror.verify(payload, data)
    with pytest.raises(VersionUnavailableError):
        mirror.lease()
    take(mirror, *full(second, 1))
    assert not mirror.dirty and equal(held(mirror), second)


def test_a_mapped_tensor_that_the_next_version_lacks_is_forgotten() -> None:
    mirror, first = Mirror("p"), make_version(0)
    take(mirror, *full(first, 0), borrowed=True)
    second = {name: bits for name, bits in changed(first, 1).items() if name != "b"}
    take(mirror, *full(second, 1))
    third = {name: bits + np.uint16(1) for name, bits in second.items()}
    take(mirror, *delta(second, third, 2))
    assert equal(held(mirror), third)


def test_a_model_that_fills_it_can_change_without_it() -> None:
    import torch

    weights = {"w": torch.arange(6.0).view(2, 3)}
    for dtype in ("float32", "bfloat16"):
        mirror = Mirror("p")
        manifest = mirror.fill(weights, run_id="r", version=0, dtype=dtype)
        [entry] = manifest.tensors
        before = mirror.host_tensors()["w"].clone()
        weights["w"].add_(1)
        assert torch.equal(mirror.host_tensors()["w"], before) and (entry.dtype, entry.shape) == (dtype, (2, 3))


ADAPTER = AdapterIdentity(rank=4, alpha=8.0, targets=("k_proj", "q_proj"), base="xxh3-128:" + "a" * 32)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            replace(ADAPTER, base="xxh3-128:" + "b" * 32),
            "version 2 holds another adapter: base xxh3-128:b+, expected xxh",
        ),
        (replace(ADAPTER, rank=8), "version 2 holds another adapter: rank 8, expected 4$"),
        (replace(ADAPTER, alpha=16.5), "version 2 holds another adapter: alpha 16.5, expected 8$"),
        (replace(ADAPTER, targets=("q_proj",)), "another adapter: targets q_proj, expected k_proj, q_proj$"),
        (None, "version 2 holds all weights of a model, expected an adapter"),
    ],
)
def test_a_mirror_refuses_the_version_of_another_adapter(other: AdapterIdentity | None, says: str) -> None:
    """With the same tensors, which only another base makes another policy."""
    import torch

    mirror = Mirror("p")
    held = mirror.fill({"w": torch.ones(4)}, run_id="r", version=1, dtype="float32", adapter=ADAPTER)
    target = Manifest.of(run_id="r", policy="p", version=2, tensors=held.tensors, adapter=other)
    data = memoryview(bytearray(torch.ones(4).numpy().tobytes()))
    sent = Payload(payload_id="f", encoding=Encoding.FULL, size_bytes=len(data), target=target)
    with pytest.raises(ModelMismatchError, match=says):
        mirror.verify(sent, data)
    assert mirror.manifest == held
    own = Manifest.of(run_id="r", policy="p", version=2, tensors=held.tensors, adapter=ADAPTER)
    mirror.write(mirror.verify(replace(sent, target=own), data))
    assert mirror.manifest.version == 2


# -- A range accepts exactly its missing bytes, from any transport.


@pytest.mark.parametrize(("offset", "size"), [(9, 1), (11, 1), (10, 6), (0, 0)])
def test_other_bytes_than_those_due_are_refused_and_change_nothing(offset: int, size: int) -> None:
    room = bytearray(5)
    wanted = ByteRange(10, 15, memoryview(room))
    with pytest.raises(CorruptDataError):
        wanted.put(offset, b"x" * size)
    assert wanted.offset == 10 and room == bytes(5)


def test_a_complete_payload_is_freed_without_a_garbage_collection() -> None:
    manifest = Manifest.of(run_id="r", policy="p", version=1, tensors=[])
    payload = Payload(payload_id="p:1", encoding=Encoding.FULL, size_bytes=10, target=manifest)
    incoming = Incoming(payload, memoryview(bytearray(10)))
    for start, end in ((0, 4), (4, 10)):
        incoming.shard(start, end).put(start, bytes(end - start))
    freed = weakref.ref(incoming)
    gc.disable()
    try:
        del incoming
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [0, 1, 63, 5_000_000])
def test_a_receive_buffer_is_aligned_and_writable(size: int) -> None:
    buffer = receive_buffer(size)
    array = np.frombuffer(buffer, dtype=np.uint8)
    assert len(buffer) == size and (not size or array.ctypes.data % ALIGNMENT == 0)
    assert array.flags.writeable
