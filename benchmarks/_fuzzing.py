"""Sends hostile requests to one service over gRPC and counts the outcomes.

A status other than INTERNAL and UNKNOWN is an answer. INTERNAL and UNKNOWN are bugs: the requests that brought them are
kept, to be sent again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from benchmarks._hostile import Hostile, Rpc

BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_OWN_WORDS = "Internal error from Core"  # grpc.aio's client, for a stream that was ended while it still wrote
_KEPT_BUGS = 20
_MOST_READ = 64  # answers of one stream
_SHORT_S = {
    "PullBatch": 0.1,
    "JoinPool": 0.1,
    "JoinTraining": 0.1,
}  # streams and waits that do not end
_CALL_S = 20.0

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Line:
    """A connection and its credentials, by the path of the RPC."""

    channel: grpc.aio.Channel
    metadata: Callable[[str], Metadata] = lambda path: ()


Connect = Callable[[], Line]


@dataclass(slots=True)
class Outcome:
    """The reactions of a service to its requests."""

    sent: int = 0
    codes: Counter[str] = field(default_factory=Counter)  # by "Method CODE"
    num_bugs: int = 0
    bugs: list[tuple[str, str, bytes]] = field(default_factory=list)  # method, what was told, the request

    def count(self, rpc: Rpc, code: grpc.StatusCode, told: str, request: bytes) -> None:
        if told == _OWN_WORDS:
            self.codes[f"{rpc.name} ENDED_WHILE_WRITING"] += 1
            return
        self.codes[f"{rpc.name} {code.name}"] += 1
        if code in BUGS:
            self.num_bugs += 1
            if len(self.bugs) < _KEPT_BUGS:
                self.bugs.append((rpc.path, f"{code.name}: {told}", request))


async def fuzz(
    connect: Connect, rpcs: Sequence[Rpc], hostile: Hostile, count: int, *, at_once: int = 16, seed: int = 0
) -> Outcome:
    """``count`` requests over ``rpcs`` in turn. A channel that is told to come back later is replaced by another one,
    which has limits of its own without authentication."""
    outcome = Outcome()
    numbers = iter(range(count))
    rng = random.Random(seed)

    async def work() -> None:
        line = connect()
        try:
            for number in numbers:
                rpc = rpcs[number % len(rpcs)]
                requests = [hostile.request(rpc) for _ in range(rng.randint(1, 4) if rpc.streams_in else 1)]
                outcome.sent += len(requests)
                code, told = await call(line, rpc, requests)
                outcome.count(rpc, code, told, requests[-1])
                if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "often" in told:
                    await line.channel.close()
                    line = connect()
        finally:
            await line.channel.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return outcome


async def call(line: Line, rpc: Rpc, requests: Sequence[bytes]) -> tuple[grpc.StatusCode, str]:
    """Send, read the answer, and return the outcome."""
    channel, options = line.channel, {"metadata": line.metadata(rpc.path), "timeout": _SHORT_S.get(rpc.name, _CALL_S)}
    try:
        if rpc.streams_in:
            make = channel.stream_stream if rpc.streams_out else channel.stream_unary
            answers = make(rpc.path)(_sent(requests), **options)
        else:
            make = channel.unary_stream if rpc.streams_out else channel.unary_unary
            answers = make(rpc.path)(requests[0], **options)
        if not rpc.streams_out:
            await answers
            return grpc.StatusCode.OK, ""
        left = _MOST_READ
        async for _ in answers:
            left -= 1
            if not left:
                answers.cancel()
                break
        return grpc.StatusCode.OK, ""
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""


async def _sent(requests: Sequence[bytes]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)
