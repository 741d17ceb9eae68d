"""The plain way to fetch: one source after another until one delivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from services.common.errors import InfrastructureError, MillraceError
from services.common.types import WeightVersion
from services.common.weights.manifest import BaseVersion
from services.inference.weights.fetch import Fetched, fetch
from services.inference.weights.fetch_links import LinkSpeeds
from services.inference.weights.fetch_source import TRANSPORTS

log = structlog.get_logger()


class SourceFetcher:
    """Tries the sources of a version in their order. Remembers how fast their links are."""

    def __init__(self, run_id: Callable[[], str], transports: Sequence[str] = TRANSPORTS) -> None:
        self._run_id = run_id
        self._transports = tuple(transports)
        self._links = LinkSpeeds()

    async def fetch(self, wanted: WeightVersion, base: BaseVersion | None) -> Fetched:
        """Raises what the last source raised; ``InfrastructureError`` when there is none."""
        if not wanted.sources:
            raise InfrastructureError(f"nobody serves version {wanted.number} of {wanted.policy} yet")
        for source in wanted.sources[:-1]:
            try:
                return await self._from(source, wanted, base)
            except MillraceError as error:
                log.warning("weights.source_failed", source=source, reason=error.reason, error=error.message)
        return await self._from(wanted.sources[-1], wanted, base)

    async def _from(self, source: str, wanted: WeightVersion, base: BaseVersion | None) -> Fetched:
        return await fetch(source, self._run_id(), wanted, base, transports=self._transports, links=self._links)
