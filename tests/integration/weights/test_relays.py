"""Replicas that fetch together: the publisher sends about one copy, and all replicas get the right bytes from faulty relays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import CorruptDataError, VersionUnavailableError
from services.common.records import FetchPlan, WeightVersion
from services.common.rpc.server import Server
from services.common.transfer.servicer import add_weight_service
from services.common.weights.snapshot import (
    BaseVersion,
    PayloadRequest,
)
from services.inference.weights import fetch as relay_module
from services.inference.weights.fetch import Relay
from services.inference.weights.mirror import Mirror
from services.inference.weights.updater import Fetched, SourceFetcher
from tests.integration.weights.transfer_world import POLICY, RUN, MemorySource, Sender, sending
from tests.waiting import WAIT_S, until

MIB = 1 << 20


class Member:
    """One replica's weights, with a server of its own."""

    def __init__(self) -> None:
        self.mirror = Mirror(POLICY)
        self.relay = Relay(self.mirror)
        self.fetcher = SourceFetcher(RUN, ("bulk", "grpc"), self.relay)
        self.server = Server(service="inference", instance_id="r", host="127.0.0.1", port=0)

    @property
    def address(self) -> str:
        return self.server.address

    async def take(self, version: WeightVersion, plan: FetchPlan | None, base: BaseVersion | None = None) -> Fetched:
        fetched = await self.fetcher.fetch(version, base, plan)
        good = False
        try:
            self.mirror.write(self.mirror.verify(fetched.payload, fetched.data))
            good = True
        finally:
            self.fetcher.settled(fetched, good=good)
        return fetched


@asynccontextmanager
async def members(count: int) -> AsyncIterator[list[Member]]:
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            member = Member()
            await add_weight_service(member.server, {POLICY: member.relay})
            await member.server.start()
            stack.push_async_callback(member.server.stop, 0.1)
            found.append(member)
        yield found


def plans(relays: Sequence[Member], count: int) -> list[FetchPlan]:
    """For ``count`` receivers, the first of which are the relays."""
    addresses = tuple(member.address for member in relays)
    return [FetchPlan(relays=addresses, own_shard=n if n < len(addresses) else None) for n in range(count)]


def version_of(sender: Sender) -> WeightVersion:
    return replace(sender.source.version, sources=(sender.address,))


def holds(member: Member, source: MemorySource) -> bool:
    manifest = member.mirror.manifest
    return manifest is not None and manifest.digest == source.manifest.digest


async def test_a_peer_fetch_takes_little_more_than_one_copy_from_the_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "STALL_S", 60.0)  # no relay is replaced because this machine is busy
    source = MemorySource(16 * MIB)
    async with sending(source, bytes_per_s=40 * MIB) as sender, members(6) as all_of_us:
        version = version_of(sender)
        taken = await asyncio.gather(
            *(m.take(version, plan) for m, plan in zip(all_of_us, plans(all_of_us[:4], 6), strict=True))
        )
        assert all(holds(member, source) for member in all_of_us)
        assert sender.budget.num_bytes_sent <= 1.01 * len(source.data)
        for fetched in taken[:4]:
            assert len(fetched.sources) == 4 and sender.address in fetched.sources
        for fetched in taken[4:]:
            assert sender.address not in fetched.sources


async def test_a_relay_that_dies_is_replaced_at_the_same_offset() -> None:
    source = MemorySource(16 * MIB)
    async with sending(source, bytes_per_s=8 * MIB) as sender, members(3) as (first, second, third):
        version = version_of(sender)
        one, two, three = plans([first, second], 3)
        dying = asyncio.create_task(first.take(version, one))
        others = [asyncio.create_task(second.take(version, two)), asyncio.create_task(third.take(version, three))]
        # in the middle of a transfer of two seconds
        await until(lambda: sender.budget.num_bytes_sent > len(source.data) // 4, "a quarter is sent")
        assert sender.budget.num_bytes_sent < len(source.data)
        dying.cancel()
        await first.server.stop(0.0)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*others)
        assert holds(second, source) and holds(third, source)
        # Only the missing bytes of the dead relay are sent again, to each of two.
        assert sender.budget.num_bytes_sent < 2.5 * len(source.data)


async def test_a_relay_that_never_hears_of_the_payload_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "STALL_S", 0.5)
    source = MemorySource(4 * MIB)
    async with sending(source) as sender, members(2) as (deaf, member):
        plan = FetchPlan(relays=(deaf.address, member.address), own_shard=1)
        async with asyncio.timeout(WAIT_S):
            fetched = await member.take(version_of(sender), plan)
        assert holds(member, source) and fetched.sources == (sender.address,)


async def test_a_relay_that_lies_is_found_out_and_the_next_attempt_relies_on_the_source_alone() -> None:
    source = MemorySource(4 * MIB)
    async with sending(source) as sender, members(2) as (liar, member):
        version = version_of(sender)
        plan = FetchPlan(relays=(liar.address, member.address), own_shard=1)
        honest = await liar.fetcher.fetch(version, None, None)
        honest.data[:100] = bytes(100)  # the relay passes these bytes on
        with pytest.raises(CorruptDataError, match="digest"):
            await member.take(version, plan)
        assert member.mirror.manifest is None
        await member.take(version, None)
        assert holds(member, source)


async def test_a_late_joiner_fetches_from_a_holder_and_the_publisher_sends_nothing() -> None:
    source = MemorySource(4 * MIB)
    async with sending(source) as sender, members(2) as (early, late):
        await early.take(version_of(sender), None)
        sent = sender.budget.num_bytes_sent
        version = replace(source.version, sources=(early.address, sender.address))
        fetched = await late.take(version, None)
        assert holds(late, source) and fetched.sources == (early.address,)
        assert sender.budget.num_bytes_sent == sent


async def test_on_the_publishers_host_its_file_is_mapped_rather_than_fetched_from_a_holder(tmp_path: Path) -> None:
    source = MemorySource(4 * MIB, file=tmp_path / "weights")
    async with sending(source) as sender, members(2) as (early, late):
        await early.take(version_of(sender), None)
        late.fetcher = SourceFetcher(RUN, ("mapped", "bulk", "grpc"), late.relay)
        fetched = await late.take(replace(source.version, sources=(early.address, sender.address)), None)
        assert (fetched.transport, fetched.sources) == ("mapped", (sender.address,)) and holds(late, source)


async def test_a_late_joiner_whose_holder_is_gone_fetches_from_the_publisher() -> None:
    source = MemorySource(4 * MIB)
    async with sending(source) as sender, members(1) as (late,):
        version = replace(source.version, sources=("127.0.0.1:9", sender.address))
        async with asyncio.timeout(WAIT_S):
            fetched = await late.take(version, None)
        assert holds(late, source) and fetched.sources == (sender.address,)


async def test_a_relay_offers_only_the_version_that_the_mirror_holds() -> None:
    source = MemorySource(2 * MIB)
    async with sending(source) as sender, members(1) as (member,):
        with pytest.raises(VersionUnavailableError, match="held: nothing"):
            member.relay.payload(PayloadRequest(run_id=RUN, policy=POLICY, version=1))
        await member.take(version_of(sender), None)
        assert member.relay.payload(PayloadRequest(run_id=RUN, policy=POLICY, version=1)).size_bytes == 2 * MIB
        for wrong in ({"version": 2}, {"run_id": "another"}):
            with pytest.raises(VersionUnavailableError):
                member.relay.payload(PayloadRequest(**{"run_id": RUN, "policy": POLICY, "version": 1, **wrong}))


def test_shards_cover_the_payload_once_and_are_not_smaller_than_pays() -> None:
    for size in (0, 1, MIB - 1, MIB, 2 * MIB, 10 * MIB + 7, 64 * MIB):
        for relays in (1, 2, 3, 16):
            cut = relay_module.cut(size, relays)
            assert [start for start, _ in cut] == [0, *(end for _, end in cut[:-1])] and cut[-1][1] == size
            assert len(cut) == 1 or min(end - start for start, end in cut[:-1]) >= MIB
            assert len(cut) <= relays
