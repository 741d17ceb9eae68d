"""Replicas for the benchmark of fan-out: processes with the real mirror, relay, fetcher, updater and weight service.

The engine is the scripted one, generating all the while at a fixed speed. No torch, so that sixteen of them start fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import structlog

from benchmarks._weight_versions import POLICY, RUN
from services.common.records import FetchPlan, Sampling, WeightVersion
from services.common.rpc.server import Server
from services.common.transfer.servicer import add_weight_service
from services.inference.engine.base import GenerationRequest
from services.inference.engine.scripted import RandomTokens, ScriptedEngine
from services.inference.weights.fetch import Relay
from services.inference.weights.mirror import Mirror
from services.inference.weights.updater import SourceFetcher, WeightUpdater

TOKENS_PER_S = 200.0  # of one request
STREAMS = 8


class Receiver:
    """One replica in a process of its own."""

    def __init__(self, send_bytes_per_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, send_bytes_per_s), daemon=True)
        self.process.start()
        self.address = ""

    def ready(self) -> None:
        self.address = self._pipe.recv()

    def reset(self) -> None:
        """Drop all versions."""
        self._pipe.send(("reset",))
        self.address = self._pipe.recv()

    def offer(self, version: WeightVersion, plan: FetchPlan | None = None) -> None:
        self._pipe.send(("offer", version, plan))

    def serving(self, timeout_s: float) -> tuple[float, tuple[str, ...]]:
        """The time at which the offered version was served, and the sources of the bytes."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"a receiver did not serve the version within {timeout_s:g} s")
        at, sources = self._pipe.recv()
        return float(at), tuple(sources)

    def num_tokens(self) -> int:
        self._pipe.send(("tokens",))
        return int(self._pipe.recv())

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


class _Replica:
    def __init__(self) -> None:
        self.mirror = Mirror(POLICY)
        self.relay = Relay(self.mirror)
        self.engine = ScriptedEngine(
            RandomTokens(vocab_size=256), num_slots=STREAMS, context_length=1 << 20, tokens_per_second=TOKENS_PER_S
        )
        # As replicas on other hosts: without mapped files.
        fetcher = SourceFetcher(RUN, ("bulk", "grpc"), self.relay)
        self.updater = WeightUpdater(self.mirror, self.engine, fetcher, Mirror.host_arrays)
        self.server = Server(service="inference", instance_id="benchmark", host="127.0.0.1", port=0)
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self, send_bytes_per_s: float) -> str:
        await add_weight_service(self.server, {POLICY: self.relay}, send_bytes_per_s=send_bytes_per_s)
        await self.server.start()
        await self.engine.start()
        self._tasks = [asyncio.create_task(self.updater.run())]
        self._tasks += [asyncio.create_task(self._generate(n)) for n in range(STREAMS)]
        return self.server.address

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.server.stop(0.0)

    async def _generate(self, stream: int) -> None:
        number = 0
        while True:
            number += 1
            request = GenerationRequest(
                request_id=f"{stream}/{number}",
                prompt_ids=(1, 2, 3),
                sampling=Sampling(max_new_tokens=64),
                stop_token_ids=(),
                seed=number,
            )
            await self.engine.generate(request)


def _serve(pipe: Connection, send_bytes_per_s: float) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asyncio.run(_obey(pipe, send_bytes_per_s))


async def _obey(pipe: Connection, send_bytes_per_s: float) -> None:
    replica = _Replica()
    pipe.send(await replica.start(send_bytes_per_s))
    reporting: asyncio.Task[None] | None = None
    while True:
        command, *arguments = await asyncio.to_thread(pipe.recv)
        if command == "reset":
            if reporting is not None:
                reporting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reporting
            await replica.stop()
            replica = _Replica()
            pipe.send(await replica.start(send_bytes_per_s))
        elif command == "offer":
            replica.updater.offer(*arguments)
            reporting = asyncio.create_task(_report(replica, arguments[0], pipe))
        elif command == "tokens":
            pipe.send(replica.engine.health().generated_tokens)


async def _report(replica: _Replica, version: WeightVersion, pipe: Connection) -> None:
    while replica.updater.held().number != version.number:  # noqa: ASYNC110 - a probe, not a service
        await asyncio.sleep(0.005)
    last = replica.updater.last
    pipe.send((time.time(), last.sources if last is not None else ()))
