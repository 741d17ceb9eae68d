"""How a replica comes by a version: from its sources in their order, together with others where there is a plan.

While a payload arrives, and afterwards, this replica's relay passes it on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from services.common.errors import InfrastructureError, MillraceError
from services.common.hosts import host_of, is_here
from services.common.types import FetchPlan, WeightVersion
from services.common.weights.manifest import BaseVersion, Payload
from services.inference.weights.fetch import Fetched, fetch
from services.inference.weights.fetch_links import LinkSpeeds
from services.inference.weights.fetch_source import TRANSPORTS, WeightSource
from services.inference.weights.incoming import Incoming
from services.inference.weights.relay import Relay
from services.inference.weights.stripes import MIN_STRIPE_BYTES, Swarm

log = structlog.get_logger()


class SourceFetcher:
    """One policy of one replica. Remembers how fast the links to its sources are."""

    def __init__(
        self,
        run_id: Callable[[], str],
        transports: Sequence[str] = TRANSPORTS,
        relay: Relay | None = None,
        on_bytes: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_bytes`` is called whenever some of a payload have come."""
        self._on_bytes = on_bytes
        self._run_id = run_id
        self._transports = tuple(transports)
        self._relay = relay
        self._links = LinkSpeeds()

    async def fetch(self, wanted: WeightVersion, base: BaseVersion | None, plan: FetchPlan | None) -> Fetched:
        """Raises what the last source raised; ``InfrastructureError`` when there is none."""
        if not wanted.sources:
            raise InfrastructureError(f"nobody serves version {wanted.number} of {wanted.policy} yet")
        sources = self._in_order(wanted.sources)
        for source in sources[:-1]:
            try:
                return await self._from(source, wanted, base, plan)
            except MillraceError as error:
                log.warning("weights.source_failed", source=source, reason=error.reason, error=error.message)
        return await self._from(sources[-1], wanted, base, plan)

    def settled(self, fetched: Fetched, *, good: bool) -> None:
        """What was fetched is in the mirror, or was found wanting."""
        if self._relay is None:
            return
        if good:
            self._relay.received(fetched.payload, fetched.data)
        else:
            self._relay.lost(fetched.payload.payload_id)

    def _in_order(self, sources: Sequence[str]) -> Sequence[str]:
        """The publisher, named last, comes first on its own host: its file is mapped, which costs it nothing."""
        publisher = sources[-1]
        if "mapped" in self._transports and is_here(host_of(publisher)):
            return (publisher, *sources[:-1])
        return sources

    async def _from(
        self, address: str, wanted: WeightVersion, base: BaseVersion | None, plan: FetchPlan | None
    ) -> Fetched:
        async def bring(source: WeightSource, payload: Payload, data: memoryview) -> tuple[str, ...]:
            incoming = Incoming(payload, data, self._on_bytes)
            if self._relay is not None:
                self._relay.receive(incoming)
            try:
                if plan is not None and payload.size_bytes >= 2 * MIN_STRIPE_BYTES:
                    return await Swarm(payload, incoming, plan, source, self._run_id()).run()
                await source.fetch(payload, incoming.stripe(0, payload.size_bytes))
                return (address,)
            except BaseException:  # cancelled ones too: whoever reads along must not wait for what will not come
                if self._relay is not None:
                    self._relay.lost(payload.payload_id)
                raise

        # Whoever fetches together must be offered one payload: nobody's own link may choose another profile.
        links = self._links if plan is None else None
        return await fetch(address, self._run_id(), wanted, base, transports=self._transports, links=links, bring=bring)
