"""The publisher's store offers a delta from a base that it holds, and the snapshot to every other receiver."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.training import WeightsConfig
from services.common.errors import (
    DeadlineError,
    NotFoundError,
    VersionConflictError,
    VersionUnavailableError,
)
from services.common.weights.codec import decode_tensor
from services.common.weights.snapshot import (
    BaseVersion,
    Bits,
    Encoding,
    Manifest,
    Payload,
    PayloadNotReadyError,
    PayloadRequest,
    Snapshot,
    SnapshotWriter,
    TensorSpec,
    tensor_digest,
    version_digest,
)
from services.trainer import publisher
from services.trainer.publisher import Delta, PublisherStore
from tests.waiting import WAIT_S

RUN, POLICY = "run-1", "model0"
SIZES = {"embed": 64_000, "norm": 32, "proj": 20_000}  # without padding between them

Weights = dict[str, Bits]


class History:
    """Versions of a small model, and a store that is told of them."""

    def __init__(self, directory: Path, seed: int = 0, **config: Any) -> None:
        self.directory = directory
        self.rng = np.random.default_rng(seed)
        self.versions: dict[int, Weights] = {}
        self.manifests: dict[int, Manifest] = {}
        self.paths: dict[int, Path] = {}
        self.config = WeightsConfig(**{"transfer": "delta", **config})
        self.store = PublisherStore(RUN, POLICY, self.config)

    def write(self, number: int, weights: Weights) -> Path:
        specs = [TensorSpec(name=name, dtype="bfloat16", shape=(len(bits),)) for name, bits in weights.items()]
        writer = SnapshotWriter.create(
            run_id=RUN, policy=POLICY, version=number, specs=specs, directories=(self.directory,)
        )
        for entry in writer.tensors:
            writer.bits(entry)[:] = weights[entry.name]
        self.versions[number], self.paths[number] = weights, writer.path
        self.manifests[number] = writer.seal()
        return writer.path

    def publish(self, number: int, share: float = 0.01, sizes: dict[str, int] | None = None) -> None:
        """About that share of the elements moves: a small one to the neighbouring values, a large one far."""
        last = self.versions.get(number - 1)
        weights = {}
        for name, size in (sizes or SIZES).items():
            drawn = self.rng.integers(0, 1 << 16, size, dtype=np.uint16)
            before = last[name] if last is not None and len(last[name]) == size else drawn
            moved = self.rng.random(size) < share
            steps = self.rng.integers(1, 2 if share < 0.1 else 256, size, dtype=np.uint16)
            weights[name] = np.where(moved, before + steps, before) if share < 1 else drawn
        self.store.add(self.write(number, weights))

    def base(self, number: int) -> BaseVersion:
        return BaseVersion(number=number, digest=self.manifests[number].digest)

    def until_held(self, *numbers: int) -> None:
        """Until exactly these versions have files: coding ends a moment after the delta appears."""
        deadline = time.monotonic() + WAIT_S
        while sorted(int(path.name.split(".")[3]) for path in self.directory.iterdir()) != list(numbers):
            assert time.monotonic() < deadline, sorted(self.directory.iterdir())
            time.sleep(0.01)

    def request(self, number: int, base: int | None = None, **changes: Any) -> PayloadRequest:
        asked: dict[str, Any] = {
            "run_id": RUN, "policy": POLICY, "version": number, "base": None if base is None else self.base(base),
        }  # fmt: skip
        return PayloadRequest(**asked | changes)

    def payload(self, number: int, base: int | None = None, **changes: Any) -> Payload:
        return self.store.payload(self.request(number, base, **changes))

    async def bytes_of(self, payload: Payload) -> bytes:
        reader = self.store.open(payload.payload_id)
        try:
            return bytes(await reader.read(0, reader.size_bytes))
        finally:
            reader.close()

    async def applied(self, payload: Payload) -> Weights:
        """The tensors of a receiver at the payload's base."""
        data = await self.bytes_of(payload)
        assert len(data) == payload.size_bytes
        held = {}
        for entry in payload.target.tensors:
            part = data[entry.offset : entry.offset + entry.length]
            if payload.base is None:
                bits: Bits = np.frombuffer(part, dtype=np.uint16)
            else:
                bits = self.versions[payload.base.number][entry.name].copy()
                for change in decode_tensor(bits.copy(), part, entry.dtype):
                    change.write_to(bits)
            assert tensor_digest(bits) == entry.digest, entry.name
            held[entry.name] = bits
        assert version_digest(payload.target.tensors) == payload.target.digest
        return held

    def assert_holds(self, weights: Weights, number: int) -> None:
        assert weights.keys() == self.versions[number].keys()
        for name, bits in weights.items():
            np.testing.assert_array_equal(bits, self.versions[number][name])


@pytest.fixture
def histories(tmp_path: Path) -> Iterator[Any]:
    made: list[History] = []

    def make(**config: Any) -> History:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(History(directory, **config))
        return made[-1]

    yield make
    for history in made:
        history.store.close()


async def test_a_receiver_whose_base_is_held_gets_a_delta_and_others_the_snapshot(histories: Any) -> None:
    history = histories(keep_versions=3)
    for number in range(1, 6):
        history.publish(number)
    for base in (3, 4):
        payload = history.payload(5, base)
        assert payload.encoding is Encoding.DELTA and payload.base == history.base(base)
        assert payload.encode_s > 0
        history.assert_holds(await history.applied(payload), 5)
    assert history.payload(5, 2).encoding is Encoding.FULL
    history.until_held(3, 4, 5)


@settings(max_examples=15)
@given(st.integers(0, 1 << 30), st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0]), min_size=2, max_size=6))
def test_every_payload_gives_the_version_for_any_change_and_any_base(seed: int, shares: list[float]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        history = History(Path(directory), seed, keep_versions=2)
        for number, share in enumerate(shares):
            history.publish(number, share)
        newest = len(shares) - 1
        for version in (newest - 1, newest):
            for base in range(version):
                payload = history.payload(version, base, wait_s=WAIT_S)
                history.assert_holds(asyncio.run(history.applied(payload)), version)
        history.store.close()


async def test_another_digest_is_never_a_base_and_other_runs_policies_and_versions_are_refused(histories: Any) -> None:
    history = histories(keep_versions=2)
    for number in (1, 2, 3, 4):
        history.publish(number)
    for number in (1, 3, 99):
        wrong = BaseVersion(number=number, digest="xxh3-128:" + "0" * 32)
        assert history.store.payload(replace(history.request(4), base=wrong)).encoding is Encoding.FULL
    for changes in ({"run_id": "another"}, {"policy": "another"}, {"version": 5}, {"version": 1}):
        with pytest.raises(VersionUnavailableError, match="is not held here"):
            history.payload(4, **changes)
    other = History(history.directory / ".." / "elsewhere")
    other.directory.mkdir()
    other.rng = np.random.default_rng(99)
    with pytest.raises(VersionConflictError, match="version 4 is served with digest"):
        history.store.add(other.write(4, {"w": np.arange(5, dtype=np.uint16)}))
    assert history.payload(4).target.digest == history.manifests[4].digest
    other.store.close()


async def test_an_open_payload_outlives_the_file_of_its_version(histories: Any) -> None:
    history = histories(keep_versions=1)
    history.publish(1)
    payload = history.payload(1)
    path, offset = payload.file
    expected = path.read_bytes()[offset : offset + payload.size_bytes]
    reader = history.store.open(payload.payload_id)
    for number in (2, 3):
        history.publish(number)
    history.until_held(3)
    assert bytes(await reader.read(0, payload.size_bytes)) == expected
    with pytest.raises(NotFoundError, match="ask for the manifest again"):
        history.store.open(payload.payload_id)


async def test_a_version_with_only_changed_elements_is_sent_whole_and_an_unchanged_one_is_empty(histories: Any) -> None:
    history = histories()
    history.publish(1)
    history.publish(2, share=1.0)
    assert history.payload(2, 1).encoding is Encoding.FULL
    history.publish(3, share=0.0)
    payload = history.payload(3, 2)
    assert (payload.encoding, payload.size_bytes) == (Encoding.DELTA, 0)
    history.assert_holds(await history.applied(payload), 3)


async def test_settings_for_full_snapshots_are_heeded(histories: Any) -> None:
    every_second, always = histories(full_every=2), histories(transfer="full")
    for history in (every_second, always):
        for number in (1, 2, 3):
            history.publish(number)
    assert every_second.payload(2, 1).encoding is Encoding.FULL
    assert every_second.payload(3, 2).encoding is Encoding.DELTA
    assert always.payload(3, 2).encoding is Encoding.FULL


async def test_names_of_payloads_are_their_content_also_after_a_restart(histories: Any) -> None:
    history = histories(keep_versions=2)
    for number in (1, 2):
        history.publish(number)
    before = history.payload(2, 1)
    full = history.payload(2)
    assert full.payload_id == f"{POLICY}:2:full:{history.manifests[2].digest}"
    again = PublisherStore(RUN, POLICY, history.config)
    for number in (1, 2):
        again.add(history.paths[number])
        again.add(history.paths[number])  # telling it twice does no harm
    after = again.payload(history.request(2, 1))
    assert after.payload_id == before.payload_id
    reader = again.open(before.payload_id)
    assert bytes(await reader.read(0, reader.size_bytes)) == await history.bytes_of(before)
    reader.close()
    again.close()


# -- coding that is slower than publishing: requests are answered "not ready", and versions are skipped ---------------------


class Gate:
    """Lets one delta be coded for each ``let``; records the pairs."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []
        self._semaphore = threading.Semaphore(0)
        self._encode = publisher.encode_delta

    def let(self, count: int = 1) -> None:
        self._semaphore.release(count)

    def encode(self, old: Snapshot, new: Snapshot, threads: ThreadPoolExecutor) -> Delta | None:
        self.pairs.append((old.manifest.version, new.manifest.version))
        assert self._semaphore.acquire(timeout=WAIT_S)
        return self._encode(old, new, threads)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(publisher, "encode_delta", made.encode)
    yield made
    made.let(100)


@pytest.fixture
def slow(tmp_path: Path, gate: Gate) -> Iterator[History]:
    made = History(tmp_path)
    yield made
    gate.let(100)
    made.store.close()


def not_ready(history: History, version: int, base: int, wait_s: float = 0.01) -> PayloadNotReadyError:
    with pytest.raises(PayloadNotReadyError) as caught:
        history.payload(version, base, wait_s=wait_s)
    return caught.value


async def test_a_request_is_told_to_ask_again_and_gets_the_delta_later(slow: History, gate: Gate) -> None:
    slow.publish(1)
    slow.publish(2)
    answer = not_ready(slow, 2, 1)
    assert answer.started and answer.size_bytes == slow.manifests[2].size_bytes
    assert slow.payload(2, wait_s=0.01).encoding is Encoding.FULL, "a request without a base waits for nothing"
    gate.let()
    payload = slow.payload(2, 1, wait_s=WAIT_S)
    slow.assert_holds(await slow.applied(payload), 2)


async def test_versions_that_no_receiver_will_fetch_are_not_coded(slow: History, gate: Gate) -> None:
    """Receivers ask for each version while the first delta is being coded."""
    slow.publish(1)
    for number in range(2, 7):
        slow.publish(number)
        assert not_ready(slow, number, number - 1).started is (number == 2)
    assert not_ready(slow, 2, 1).started, "and still served, beyond keep_versions"
    held = {int(path.name.split(".")[3]) for path in slow.directory.iterdir()}
    assert held == {1, 2, 5, 6}, "base and target of the delta in progress, and keep_versions"
    gate.let(2)
    payload = slow.payload(6, 5, wait_s=WAIT_S)
    slow.assert_holds(await slow.applied(payload), 6)
    assert gate.pairs == [(1, 2), (5, 6)]
    assert slow.store.gauges()["deltas_skipped"] == 3
    slow.publish(7)
    slow.until_held(6, 7)  # the skipped ones hold no memory
    assert slow.payload(6, 1).encoding is Encoding.FULL, "its base is not held any more"


def test_auto_maps_on_one_host_and_codes_for_others(histories: Any) -> None:
    history = histories(transfer="auto")
    for number in (1, 2):
        history.publish(number)
    assert history.payload(2, 1, can_map=True).encoding is Encoding.FULL
    assert history.store.gauges()["deltas"] == 0
    assert history.payload(2, 1, wait_s=WAIT_S).encoding is Encoding.DELTA


def test_a_failed_delta_fails_its_requests_and_not_the_next_delta(
    histories: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Delta:
        raise DeadlineError("the test failed it")

    history = histories()
    for number in (1, 2):
        history.publish(number)
    with monkeypatch.context() as patched:
        patched.setattr(publisher, "encode_delta", fails)
        with pytest.raises(DeadlineError):
            history.payload(2, 1)
    assert history.payload(2, 1, wait_s=WAIT_S).encoding is Encoding.DELTA, "the next request tries again"
