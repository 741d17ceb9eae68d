"""Membership of the environment gateway: tells replicas its address, and issues no tasks during its absence.

On node 0 the recipe has the address, and no task waits for the gateway. A gateway on another node reports its own
address; during its absence the dispatcher issues no task, because rollouts without a gateway fail. Independent of grpc.
"""

from __future__ import annotations

import structlog

from services.common.config.processes.envgateway import EnvGatewayConfig
from services.common.errors import ConfigError, InvalidRequestError
from services.common.net.hosts import address, check_place
from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.members.commands import UseGateway
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.stalls import Hold

log = structlog.get_logger()


class GatewayApi:
    def __init__(self, config: EnvGatewayConfig | None, pool: ReplicaPool, dispatcher: Dispatcher) -> None:
        self._config = config
        self._pool = pool
        self._dispatcher = dispatcher
        self._is_elsewhere = self._config is not None and self._config.node != 0
        self._joined: dict[int, str] = {}  # addresses, by the order in which they came
        self._number = 0
        self._known = ""  # of the gateway on another node that joined last
        self._hold()

    @property
    def address(self) -> str:
        """Address for replicas; empty where the run has no gateway, or before its first join."""
        if self._config is None or self._is_elsewhere:
            return self._known
        return address(self._config.host, self._config.port)

    def join(self, place: str) -> int:
        """Register a gateway's stream; returns its number, for ``left``.

        Raises ``InvalidRequestError`` for a run without a gateway, and for an address that cannot be dialled.
        """
        if self._config is None:
            raise InvalidRequestError("this run has no environment gateway (envgateway: null)")
        try:
            check_place(place)
        except ConfigError as error:
            raise InvalidRequestError(error.message) from None
        self._number += 1
        self._joined[self._number] = place
        log.info("envgateway.joined", address=place)
        self._changed()
        return self._number

    def left(self, number: int) -> None:
        """Remove a gateway whose stream has ended."""
        log.info("envgateway.left", address=self._joined.pop(number))
        self._changed()

    def _changed(self) -> None:
        if not self._is_elsewhere:
            return
        newest = next(reversed(self._joined.values()), self._known)
        if newest != self._known:
            self._known = newest
            for replica in self._pool:
                self._pool.send(replica, UseGateway(newest))
        self._hold()

    def _hold(self) -> None:
        if self._config is None or not self._is_elsewhere:
            return
        away = f"the environment gateway of node {self._config.node} (envgateway.node) has not joined, or has left"
        self._dispatcher.hold(Hold.GATEWAY, "" if self._joined else away)
