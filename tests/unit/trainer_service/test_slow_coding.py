"""Coding that is slower than publishing: requests are answered "not ready", and versions are skipped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import DeadlineError
from services.common.weights.snapshot import Encoding, PayloadNotReadyError, Snapshot
from services.trainer import publisher
from services.trainer.publisher import Delta
from tests.unit.trainer_service.test_publisher_store import History
from tests.waiting import WAIT_S


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
def history(tmp_path: Path, gate: Gate) -> Iterator[History]:
    made = History(tmp_path)
    yield made
    gate.let(100)
    made.store.close()


def not_ready(history: History, version: int, base: int, wait_s: float = 0.01) -> PayloadNotReadyError:
    with pytest.raises(PayloadNotReadyError) as caught:
        history.payload(version, base, wait_s=wait_s)
    return caught.value


async def test_a_request_is_told_to_ask_again_and_gets_the_delta_later(history: History, gate: Gate) -> None:
    history.publish(1)
    history.publish(2, settle=False)
    answer = not_ready(history, 2, 1)
    assert answer.started and answer.size_bytes == history.manifests[2].size_bytes
    assert history.payload(2, wait_s=0.01).encoding is Encoding.FULL, "a request without a base waits for nothing"
    gate.let()
    payload = history.payload(2, 1, wait_s=WAIT_S)
    history.assert_holds(await history.applied(payload), 2)


async def test_versions_that_no_receiver_will_fetch_are_not_coded(history: History, gate: Gate) -> None:
    for number in range(1, 7):
        history.publish(number, settle=False)
    assert not not_ready(history, 6, 5).started, "the delta to version 2 is in progress"
    assert not_ready(history, 2, 1).started, "and still served, beyond keep_versions"
    gate.let(2)
    payload = history.payload(6, 5, wait_s=WAIT_S)
    history.assert_holds(await history.applied(payload), 6)
    assert gate.pairs == [(1, 2), (5, 6)]
    assert history.store.gauges()["deltas_skipped"] == 3
    history.until_held(5, 6)  # the skipped ones hold no memory
    assert history.payload(6, 1).encoding is Encoding.FULL, "its base is not held any more"


def test_few_snapshots_are_held_however_far_coding_lags(history: History, gate: Gate) -> None:
    for number in range(1, 12):
        history.publish(number, settle=False)
    held = {int(path.name.split(".")[3]) for path in history.directory.iterdir()}
    assert held == {1, 2, 10, 11}, "base and target of the delta in progress, and keep_versions"


def test_the_deltas_of_slow_coding_are_made_once_and_their_versions_stay_served(tmp_path: Path, gate: Gate) -> None:
    history = History(tmp_path, transfer="auto")
    for number in (1, 2):
        history.publish(number)
    assert gate.pairs == [], "no receiver on another host has asked"
    assert not_ready(history, 2, 1).started
    for number in (3, 4):  # version 1, the base, is older than keep_versions now
        history.publish(number, settle=False)
    assert not_ready(history, 2, 1).started
    gate.let(10)
    assert history.payload(2, 1, wait_s=WAIT_S).encoding is Encoding.DELTA
    assert gate.pairs.count((1, 2)) == 1
    history.settle()
    history.until_held(3, 4)
    history.store.close()


def test_auto_maps_on_one_host_and_codes_for_others(tmp_path: Path) -> None:
    history = History(tmp_path, transfer="auto")
    for number in (1, 2):
        history.publish(number)
    assert history.payload(2, 1, can_map=True).encoding is Encoding.FULL
    assert history.store.gauges()["deltas"] == 0
    assert history.payload(2, 1, wait_s=WAIT_S).encoding is Encoding.DELTA
    for number in range(3, 9):
        history.publish(number)
        in_advance = history.store.gauges()["deltas"] > 0
        assert in_advance == (number <= 7), "for the receiver that asked lately"
    history.store.close()


def test_a_failed_delta_fails_its_requests_and_not_the_next_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Delta:
        raise DeadlineError("the test failed it")

    history = History(tmp_path)
    history.publish(1)
    with monkeypatch.context() as patched:
        patched.setattr(publisher, "encode_delta", fails)
        history.publish(2)
        with pytest.raises(DeadlineError):
            history.payload(2, 1)
    assert history.payload(2, 1, wait_s=WAIT_S).encoding is Encoding.DELTA, "the next request tries again"
    history.publish(3)
    assert history.payload(3, 2).encoding is Encoding.DELTA
    history.store.close()
