"""Follows weight versions for an engine that has no weights (scripted): what is announced is held at once.

The same seam as ``WeightUpdater``, without mirror, publisher and transfer, so that a whole ring turns without a model.
"""

from __future__ import annotations

import asyncio

from services.common.accounts import Activity, TimeAccount
from services.common.types import FetchPlan, WeightTransfer, WeightVersion
from services.inference.engine.base import Engine
from services.inference.engine.weight_update import WeightUpdate

CHECKPOINT_DIGEST = "scripted"  # of the version 0 that nobody announces; every replica without weights has the same


class AnnouncedVersions:
    """One policy of one replica. Holds nothing (version -1) until the first announcement; of a policy that is not trained,
    version 0 from the start."""

    def __init__(self, policy: str, engine: Engine, first: int = -1) -> None:
        self._engine = engine
        self.account = TimeAccount(f"weights/{policy}", rest=Activity("up to date"))
        self._held = WeightVersion(policy=policy, number=first, digest=CHECKPOINT_DIGEST if first == 0 else "")
        self._wanted = self._held
        self._changed = asyncio.Event()

    def offer(self, version: WeightVersion, plan: FetchPlan | None = None) -> None:
        """A version exists; the newest wins."""
        if version.number >= self._wanted.number:
            self._wanted = version
            self._changed.set()

    def held(self) -> WeightVersion:
        """What the engine stamps on its tokens; number -1 before the first announcement of a trained policy."""
        return self._held

    def gauges(self) -> dict[str, float]:
        return {"weights_version": float(self._held.number)}

    def take_transfers(self) -> tuple[WeightTransfer, ...]:
        """Nothing is transferred."""
        return ()

    async def run(self) -> None:
        """Follow the offers. No deadline: it waits for the next version as long as the replica lives."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted
            with self.account.during("changing the engine's weights", on=f"engine/{wanted.policy}"):
                await self._engine.update(WeightUpdate(version=wanted.number, complete=False))
            self.account.beat()
            self._held = WeightVersion(policy=wanted.policy, number=wanted.number, digest=wanted.digest)
