"""Polls the status of a peer, so that a waiting component can report whether the peer is alive.

    ask GetStatus -> answered: its gauges and accounts   -> pause -> ask again
                  '-> not within the deadline: silent since the last answer

For dependencies that no other component watches: the gateway of a replica, the weight publisher of a trainer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import grpc
import structlog

from services.common.errors import RollmillError, UserError
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.rpc.client.channel import channel, translated_errors
from services.common.telemetry.accounts import AccountState, PeerState
from services.common.telemetry.components import Component
from services.common.wire import read

log = structlog.get_logger()

ASK_EVERY_S = 2.0
ANSWER_S = 3.0


class PeerWatch:
    """``run`` polls until cancelled; ``state`` is the newest known state, None before there is an address."""

    def __init__(
        self,
        component: Component,
        address: Callable[[], str],
        *,
        every_s: float = ASK_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.component = component
        self._address = address
        self._every_s = every_s
        self._clock = clock
        self._state: PeerState | None = None
        self._silent_since: float | None = None

    def state(self) -> PeerState | None:
        known = self._state
        if known is None or self._silent_since is None:
            return known
        return replace(known, silent_s=self._clock() - self._silent_since)

    async def run(self) -> None:
        """Without a deadline: as long as its owner lives. Each question has one."""
        while True:
            if address := self._address():
                await self._ask_at(address)
            await asyncio.sleep(self._every_s)

    async def _ask_at(self, address: str) -> None:
        """Until the address changes."""
        async with channel(address) as connection:
            stub: status_pb2_grpc.StatusServiceAsyncStub = status_pb2_grpc.StatusServiceStub(connection)
            while address == self._address():
                asked = self._clock()
                try:
                    with translated_errors(f"{self.component} {address}"):
                        answer = await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=ANSWER_S)
                except UserError as error:  # a refusal is an answer, too: the peer is alive
                    log.warning("peer.refused", peer=self.component, address=address, error=error.message)
                    self._heard(address, status_pb2.GetStatusResponse())
                except RollmillError as error:
                    self._missed(address, asked, error.message)
                except grpc.aio.UsageError:
                    return  # the channel was closed under us: the process is leaving
                else:
                    self._heard(address, answer)
                await asyncio.sleep(self._every_s)

    def _missed(self, address: str, asked: float, detail: str) -> None:
        if self._silent_since is None:
            self._silent_since = asked
            log.warning("peer.silent", peer=self.component, address=address, error=detail)
        known = self._state
        self._state = PeerState(
            component=self.component,
            address=address,
            detail=detail,
            gauges=known.gauges if known else {},
            accounts=known.accounts if known else (),
        )

    def _heard(self, address: str, answer: status_pb2.GetStatusResponse) -> None:
        if self._silent_since is not None:
            log.info("peer.back", peer=self.component, silent_s=round(self._clock() - self._silent_since, 1))
        self._silent_since = None
        self._state = PeerState(
            component=self.component,
            address=address,
            gauges=dict(answer.gauges),
            accounts=tuple(read(AccountState, account) for account in answer.accounts),
        )
