"""Membership of the environment gateway: tells replicas its address, and holds tasks back while it is away.

On node 0 the address is the recipe's, and nothing waits for it. A gateway on another node tells its own address; while it
is away no task is issued, because rollouts without a gateway fail. Knows nothing about grpc.
"""

from __future__ import annotations

import structlog

from services.common.errors import ConfigError, InvalidRequestError
from services.common.hosts import address, check_place
from services.orchestrator.commands import UseGateway
from services.orchestrator.ring import Ring
from services.orchestrator.stalls.facts import GATEWAY

log = structlog.get_logger()


class GatewaySide:
    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._config = ring.recipe.envgateway
        self._is_elsewhere = self._config is not None and self._config.node != 0
        self._joined: dict[int, str] = {}  # addresses, by the order in which they came
        self._number = 0
        self._known = ""  # of the gateway on another node that joined last
        self._hold()

    @property
    def address(self) -> str:
        """Where replicas find it; empty where the run has none, or while it has never joined."""
        if self._config is None or self._is_elsewhere:
            return self._known
        return address(self._config.host, self._config.port)

    def join(self, place: str) -> int:
        """A gateway's stream begins; returns its number, for ``left``.

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
        """Its stream has ended."""
        log.info("envgateway.left", address=self._joined.pop(number))
        self._changed()

    def _changed(self) -> None:
        if not self._is_elsewhere:
            return
        newest = next(reversed(self._joined.values()), self._known)
        if newest != self._known:
            self._known = newest
            for replica in self._ring.pool:
                self._ring.pool.send(replica, UseGateway(newest))
        self._hold()

    def _hold(self) -> None:
        if self._config is None or not self._is_elsewhere:
            return
        away = f"the environment gateway of node {self._config.node} (envgateway.node) has not joined, or has left"
        self._ring.dispatcher.hold(GATEWAY, "" if self._joined else away)
