"""Every transport of payload bytes over real sockets: received bytes, broken streams, refusals."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
import structlog.testing
import zmq

from services.common.errors import ConfigError, CorruptDataError
from services.common.telemetry.logs import LogEvent
from services.common.transfer import servicer as servicer_module
from services.common.transfer.bulk import OFFSET, REQUEST, BulkServer, SendBudget
from services.inference.weights.fetch import BulkTransport, ByteRange, WeightSource
from tests.integration.weights.transfer_world import POLICY, RUN, MemorySource, Sender, fetched, sending
from tests.waiting import WAIT_S, until

SIZE = 5_300_001  # several chunks, and a rest
WAYS = ("mapped", "bulk", "grpc")


async def test_the_first_way_that_both_ends_have_is_taken(tmp_path: Path) -> None:
    with_file, without = MemorySource(SIZE, tmp_path / "payload"), MemorySource(SIZE)
    async with sending(with_file) as sender:
        assert (await fetched(sender.address, with_file.version)).transport == "mapped"
        for transports, taken in ((["bulk", "mapped"], "bulk"), (["grpc", "mapped"], "grpc")):
            assert (await fetched(sender.address, with_file.version, transports=transports)).transport == taken
    async with sending(without) as sender:
        assert (await fetched(sender.address, without.version)).transport == "bulk"


async def test_a_file_is_offered_to_the_same_host_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MemorySource(SIZE, tmp_path / "payload")
    monkeypatch.setattr(servicer_module, "host_identity", lambda: "another host")
    async with sending(source) as sender:
        assert (await fetched(sender.address, source.version)).transport == "bulk"


@pytest.mark.parametrize("damage", ["gone", "short", "directory"])
async def test_a_file_that_differs_from_the_offer_is_not_mapped(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "payload"
    source = MemorySource(SIZE, path)
    path.unlink()
    if damage == "short":
        path.write_bytes(bytes(SIZE))
    elif damage == "directory":
        path.mkdir()
    async with sending(source) as sender:
        got = await fetched(sender.address, source.version)
        assert got.transport == "bulk"
        assert got.data == source.data.data


@pytest.mark.parametrize("way", WAYS)
async def test_a_range_brings_exactly_its_bytes(way: str, tmp_path: Path) -> None:
    source = MemorySource(SIZE, tmp_path / "payload")
    async with sending(source) as sender, WeightSource(sender.address, RUN, transports=[way]) as peer:
        payload = await peer.payload(source.version, None)
        for start, end in ((0, 10), (1_048_570, 3_000_000), (SIZE - 1, SIZE), (7, 7)):
            room = bytearray(end - start)
            offsets: list[int] = []
            await peer.fetch(payload, ByteRange(start, end, memoryview(room), offsets.append))
            assert room == source.data[start:end].tobytes()
            assert offsets == sorted(offsets)
            assert start == end or offsets[-1] == end
        with pytest.raises(ValueError, match="of a payload of"):
            await peer.fetch(payload, ByteRange(SIZE - 1, SIZE + 5, memoryview(bytearray(6))))


async def test_a_bulk_transfer_that_fails_goes_on_over_grpc_at_the_same_offset() -> None:
    source = MemorySource(SIZE)
    source.fail_at = 2_500_000
    async with sending(source) as sender:
        with structlog.testing.capture_logs() as logs:
            fetching = asyncio.create_task(fetched(sender.address, source.version))
            await until(lambda: [line for line in logs if line["event"] == LogEvent.TRANSPORT_FAILED], every_s=0)
            source.fail_at = None
            got = await fetching
    [line] = [line for line in logs if line["event"] == LogEvent.TRANSPORT_FAILED]
    assert (line["transport"], line["offset"]) == ("bulk", 2_500_000)
    assert got.transport == "grpc"
    assert got.data == source.data.data
    assert sender.budget.num_bytes_sent == SIZE, "no byte is sent twice"


async def test_a_receiver_that_reads_nothing_holds_a_bounded_number_of_frames() -> None:
    source = MemorySource(100 << 20)
    async with sending(source) as sender:
        ticket = sender.bulk.tickets.give(source, f"{POLICY}:1:full:{source.manifest.digest}")
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger, socket.rcvhwm, socket.rcvbuf = 0, 1, 1 << 20
            socket.connect(sender.bulk.endpoint)
            for _ in range(2):  # one transfer at a time
                socket.send(REQUEST.pack(ticket, 0, 100 << 20))
            await until(lambda: sender.bulk.num_refused)
            await asyncio.sleep(0.2)
            assert sender.budget.num_bytes_sent < 50 << 20
            assert (await fetched(sender.address, source.version)).transport == "bulk", "others are served"


def _ask(sender: Sender, frames: list[bytes]) -> list[bytes]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 5000
        socket.connect(sender.bulk.endpoint)
        socket.send_multipart(frames)
        return socket.recv_multipart()


GET = REQUEST.pack(bytes(32), 0, 10)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([GET], b"NOT_FOUND"),
        ([b""], b"INVALID_REQUEST"),
        ([b"garbage"], b"INVALID_REQUEST"),
        ([GET, b"more"], b"INVALID_REQUEST"),
    ],
)
async def test_wrong_tickets_and_garbage_get_errors_without_effect_on_others(
    frames: list[bytes], reason: bytes
) -> None:
    source = MemorySource(SIZE)
    async with sending(source) as sender:
        answer = await asyncio.to_thread(_ask, sender, frames)
        assert not answer[0] and answer[1].startswith(reason)
        assert (await fetched(sender.address, source.version)).transport == "bulk"


async def test_a_ticket_reads_its_payload_only_within_bounds_and_expires() -> None:
    source = MemorySource(SIZE)
    async with sending(source, idle_s=1.0) as sender:
        ticket = sender.bulk.tickets.give(source, f"{POLICY}:1:full:{source.manifest.digest}")

        def get(start: int, end: int) -> list[bytes]:
            return _ask(sender, [REQUEST.pack(ticket, start, end)])

        assert await asyncio.to_thread(get, 5, 105) == [OFFSET.pack(5), source.data[5:105].tobytes()]
        for start, end in ((SIZE, SIZE + 1), (SIZE - 1, SIZE + 1), (0, 0), (10, 5), ((1 << 64) - 1, (1 << 64) - 1)):
            head, reason = await asyncio.to_thread(get, start, end)
            assert not head and reason.startswith(b"OFFSET")
        await asyncio.sleep(1.2)
        answer = await asyncio.to_thread(get, 0, 10)
        assert answer[1].startswith(b"NOT_FOUND")
        await until(lambda: not source.num_leases)


HEAD = OFFSET.pack(0)


@pytest.mark.parametrize(
    "answer",
    [
        [OFFSET.pack(7), bytes(100)],  # not the missing bytes
        [HEAD, bytes(101)],  # more than was asked for
        [HEAD, bytes(100), b""],
        [HEAD],
        [HEAD + b"x", bytes(100)],
    ],
)
async def test_answers_that_make_no_sense_are_no_payload(answer: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger, socket.rcvtimeo = 0, int(WAIT_S * 1000)
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            peer, _ = socket.recv_multipart()
            socket.send_multipart([peer, *answer])

        transport = BulkTransport(f"tcp://127.0.0.1:{port}", bytes(32), "the test")
        serving = asyncio.create_task(asyncio.to_thread(serve))
        with pytest.raises(CorruptDataError):
            await transport.fetch(ByteRange(0, 100, memoryview(bytearray(100))))
        await serving


async def test_a_payload_larger_than_its_version_gets_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    source = MemorySource(SIZE)
    honest = source.payload
    monkeypatch.setattr(source, "payload", lambda request: replace(honest(request), size_bytes=1 << 50))
    async with sending(source) as sender:
        with pytest.raises(CorruptDataError, match="bytes for a version of"):
            await fetched(sender.address, source.version)


def test_off_loopback_the_bulk_plane_is_never_plain() -> None:
    with pytest.raises(ConfigError, match="in the clear"):
        BulkServer(SendBudget(), host="10.0.0.1")


@pytest.mark.parametrize("endpoint", ["tcp://192.0.2.1:5555", "ipc:///tmp/somebody", "inproc://x", "nonsense"])
async def test_a_bulk_endpoint_that_is_not_on_loopback_is_not_gone_to(endpoint: str) -> None:
    source = MemorySource(SIZE)
    async with sending(source) as sender:
        sender.bulk.endpoint = endpoint
        with structlog.testing.capture_logs() as logs:
            got = await fetched(sender.address, source.version, transports=["bulk"])
    assert got.transport == "grpc" and got.data == source.data.data
    assert not [line for line in logs if line["event"] == LogEvent.TRANSPORT_FAILED], "this transport was not tried"


async def test_a_receiver_that_gives_up_leaves_no_transfer_and_no_lease() -> None:
    source = MemorySource(SIZE)
    source.delay_s = 0.05
    async with sending(source, idle_s=0.5) as sender:
        for way in ("bulk", "grpc"):
            fetching = asyncio.create_task(fetched(sender.address, source.version, transports=[way]))
            await until(lambda: source.num_leases == 1, "the transfer runs")
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            await until(lambda: not (source.num_leases or sender.bulk.num_transfers))


async def test_all_ways_of_one_sender_share_its_rate() -> None:
    source = MemorySource(1 << 20)
    async with sending(source, bytes_per_s=8 << 20) as sender:
        began = time.monotonic()
        ways = ("bulk", "grpc", "bulk", "grpc")
        got = await asyncio.gather(*(fetched(sender.address, source.version, transports=[way]) for way in ways))
        assert time.monotonic() - began >= 0.35, "4 MiB at 8 MiB/s, less the burst"
        assert all(one.data == source.data.data for one in got)
