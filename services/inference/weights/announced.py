"""Follows weight versions for an engine without weights (scripted): an announced version is held at once.

The same interface as ``WeightUpdater``, without mirror, publisher and transfer, so that a run needs no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.common.records.types import FetchPlan, WeightTransfer, WeightVersion
from services.common.telemetry.accounts import Activity, TimeAccount
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.components import engine, weights
from services.inference.engine.base import Engine, sharing
from services.inference.engine.weight_update import WeightUpdate

CHECKPOINT_DIGEST = "scripted"  # of version 0, which is not announced; every replica without weights has the same


class AnnouncedVersions:
    """The versions of one policy of one replica: -1 until the first announcement; for a policy that is not trained, 0 from the
    start."""

    def __init__(self, policy: str, engine: Engine, first: int = -1) -> None:
        self._engine = engine
        self.account = TimeAccount(weights(policy), rest=Activity(ActivityName.UP_TO_DATE))
        self._held = WeightVersion(policy=policy, number=first, digest=CHECKPOINT_DIGEST if first == 0 else "")
        self._wanted = self._held
        self._changed = asyncio.Event()
        self.on_held: Callable[[], None] = lambda: None

    def offer(self, version: WeightVersion, plan: FetchPlan | None = None) -> None:
        """Announce a version; the newest is held."""
        if version.number >= self._wanted.number:
            self._wanted = version
            self._changed.set()

    def held(self) -> WeightVersion:
        """The version of the engine's tokens; number -1 before the first announcement of a trained policy."""
        return self._held

    def gauges(self) -> dict[str, float]:
        return {"weights_version": float(self._held.number)}

    def take_transfers(self) -> tuple[WeightTransfer, ...]:
        """Always empty."""
        return ()

    async def release(self) -> None:
        """Stop the engine. New versions are held at once all the same."""
        await sharing(self._engine).release()

    async def restore(self) -> None:
        """Let the engine go on, with the newest version."""
        await sharing(self._engine).restore(WeightUpdate(version=self._held.number, complete=False))

    async def run(self) -> None:
        """Follow the offers. No deadline: the next version may take as long as the replica lives."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted
            with self.account.during(ActivityName.CHANGING_WEIGHTS, on=engine(wanted.policy)):
                await self._engine.update(WeightUpdate(version=wanted.number, complete=False))
            self.account.beat()
            self._held = WeightVersion(policy=wanted.policy, number=wanted.number, digest=wanted.digest)
            self.on_held()
