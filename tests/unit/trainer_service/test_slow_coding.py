"""Coding that is slower than publishing: requests are answered "not ready", and versions are skipped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import DeadlineError
from services.common.weights.manifest import Encoding, ReceiverRates
from services.common.weights.not_ready import PayloadNotReadyError
from services.common.weights.snapshot_file import Snapshot
from services.trainer.publish.deltas import Delta, DeltaMaker
from tests.unit.trainer_service.test_publisher_store import History
from tests.waiting import WAIT_S, wait_until


class GatedMaker(DeltaMaker):
    """Codes one delta for each ``let``; records the pairs."""

    def __init__(self) -> None:
        super().__init__(1)
        self.pairs: list[tuple[int, int]] = []
        self._gate = threading.Semaphore(0)

    def let(self, count: int = 1) -> None:
        self._gate.release(count)

    def encode(self, old: Snapshot, new: Snapshot) -> Delta:
        self.pairs.append((old.manifest.version, new.manifest.version))
        assert self._gate.acquire(timeout=WAIT_S)
        return super().encode(old, new)


@pytest.fixture
def maker() -> Iterator[GatedMaker]:
    made = GatedMaker()
    yield made
    made.let(100)


@pytest.fixture
def history(tmp_path: Path, maker: GatedMaker) -> Iterator[History]:
    made = History(tmp_path, maker=maker)
    yield made
    maker.let(100)
    made.store.close()


def not_ready(history: History, version: int, base: int, wait_s: float = 0.01) -> PayloadNotReadyError:
    with pytest.raises(PayloadNotReadyError) as caught:
        history.payload(version, base, wait_s=wait_s)
    return caught.value


async def test_a_request_is_told_to_ask_again_and_gets_the_delta_later(history: History, maker: GatedMaker) -> None:
    history.publish(1)
    history.publish(2, settle=False)
    answer = not_ready(history, 2, 1)
    assert answer.started and answer.size_bytes == history.manifests[2].size_bytes and answer.after_s > 0
    assert history.payload(2, wait_s=0.01).encoding is Encoding.FULL, "a request without a base waits for nothing"
    maker.let()
    payload = history.payload(2, 1, wait_s=WAIT_S)
    history.assert_holds(await history.applied(payload), 2)


async def test_versions_that_no_receiver_will_fetch_are_not_coded(history: History, maker: GatedMaker) -> None:
    for number in range(1, 7):
        history.publish(number, settle=False)
    assert not not_ready(history, 6, 1).started, "the delta to version 2 is in progress"
    assert not_ready(history, 2, 1).started, "and still served, beyond keep_versions"
    maker.let()
    wait_until(lambda: len(maker.pairs) == 2)
    assert not_ready(history, 6, 1).started
    maker.let()
    payload = history.payload(6, 1, wait_s=WAIT_S)
    history.assert_holds(await history.applied(payload), 6)
    assert maker.pairs == [(1, 2), (2, 6)]
    assert history.store.gauges()["deltas_skipped"] == 3
    history.until_held(5, 6)  # the skipped ones hold no memory


def test_at_most_three_snapshots_are_held_beside_the_newest(history: History, maker: GatedMaker) -> None:
    for number in range(1, 12):
        history.publish(number, settle=False)
    held = {int(path.name.split(".")[3]) for path in history.directory.iterdir()}
    assert held == {1, 2, 10, 11}, "base and target of the delta in progress, and keep_versions"


def test_a_request_ends_at_its_own_deadline_while_coding_goes_on(history: History, maker: GatedMaker) -> None:
    history.publish(1)
    history.publish(2, settle=False)
    maker.let()
    history.settle()
    history.publish(3, settle=False)
    with ThreadPoolExecutor(1) as threads:
        patient = threads.submit(history.payload, 3, 1)  # without a wait, as an older receiver asks
        assert not_ready(history, 3, 1).started
        maker.let()
        assert patient.result(WAIT_S).encoding is Encoding.DELTA


def test_a_receiver_without_a_link_in_the_chain_shares_one_delta_from_its_snapshot(
    tmp_path: Path, maker: GatedMaker
) -> None:
    history = History(tmp_path, maker=maker, transfer="auto")
    for number in (1, 2):
        history.publish(number)
    assert maker.pairs == [], "no receiver on another host has asked"
    assert not_ready(history, 2, 1).started
    for number in (3, 4):  # version 1, the base, is older than keep_versions now
        history.publish(number, settle=False)
    assert not_ready(history, 2, 1).started
    maker.let(10)
    assert history.payload(2, 1, wait_s=WAIT_S).encoding is Encoding.DELTA
    assert maker.pairs.count((1, 2)) == 1
    history.settle()
    history.until_held(3, 4)
    history.store.close()


def test_auto_maps_on_one_host_and_codes_for_others(tmp_path: Path) -> None:
    history = History(tmp_path, transfer="auto")
    for number in (1, 2):
        history.publish(number)
    here = history.payload(2, 1, can_map=True)
    assert (here.encoding, here.choice) == (Encoding.FULL, "mapped on one host")
    assert history.store.gauges()["deltas"] == 0
    away = history.payload(2, 1)
    assert (away.encoding, away.choice) == (Encoding.DELTA, "delta, rates not measured")
    history.publish(3)
    assert history.store.gauges()["deltas"] == 1, "in advance, for the receiver that asked before"
    fast = history.payload(3, 2, rates=ReceiverRates(link=1e15, decode=1e6))
    assert fast.encoding is Encoding.FULL and fast.choice.startswith("full: delta ")
    history.publish(4)
    assert history.store.gauges()["deltas"] == 1, "not coded: the snapshot was cheaper"
    history.store.close()


def test_a_failed_delta_fails_its_requests_and_not_the_next_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(DeltaMaker):
        fail = True

        def encode(self, *arguments: Any) -> Delta:
            if self.fail:
                raise DeadlineError("the test failed it")
            return super().encode(*arguments)

    maker = Failing(1)
    history = History(tmp_path, maker=maker)
    history.publish(1)
    history.publish(2)
    with pytest.raises(DeadlineError):
        history.payload(2, 1)
    maker.fail = False
    history.publish(3)
    assert history.payload(3, 2).encoding is Encoding.DELTA
    history.store.close()
