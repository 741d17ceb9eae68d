"""Leases run by a clock that does not jump: an hour forward or back of the wall clock of a real process ends none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._chaos_hooks import CLOCKS
from benchmarks._peers import ScriptedReplica, ScriptedTrainer
from tests.integration.orchestrator.conftest import Orchestrator
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow


class WithHooks(Orchestrator):
    """An orchestrator with a settable ``time.time``."""

    def spawn(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "benchmarks._chaos_hooks",
            "services.orchestrator",
            "--run-dir",
            str(self.run_dir),
        ]
        with (self.run_dir / "stderr.txt").open("ab") as log:
            return subprocess.Popen(
                command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", CLOCKS: str(self.run_dir.parent)}
            )

    def jump(self, seconds: float) -> None:
        assert self.process is not None
        (self.run_dir.parent / str(self.process.pid)).write_text(str(seconds))


LEASE_S = 5.0  # of peers in this process, which may wait for a core


async def test_a_jump_of_the_wall_clock_ends_no_lease_and_the_run_goes_on(tmp_path: Path) -> None:
    orchestrator = WithHooks(
        tmp_path / "run",
        run__steps=1000,
        orchestrator__lease_s=LEASE_S,
        evaluation__at_start=False,
        evaluation__at_end=False,
    )
    peers: list[ScriptedReplica | ScriptedTrainer] = []
    try:
        _, trainer = await orchestrator.start_with(peers, latency_s=0.02, train_s=0.02)
        async with asyncio.timeout(2 * WAIT_S):
            await trainer.run(3)
            training = asyncio.ensure_future(trainer.train(range(4, 1000)))
            for seconds in (3600.0, -3600.0):
                before = await orchestrator.progress()
                orchestrator.jump(seconds)
                # The jump has been seen, and more than a lease has passed since.
                seen = await orchestrator.until(
                    lambda now, at=before.at.seconds: abs(now.at.seconds - at) > 3000  # type: ignore[misc]
                )
                await asyncio.sleep(1.2 * LEASE_S)
                after = await orchestrator.until(
                    lambda now, version=seen.policies[0].version: (  # type: ignore[misc]
                        now.policies[0].version > version or training.done()
                    )
                )
            training.cancel()
        assert [found.replica_id for found in after.replicas] == ["a"]
        assert after.counters.get("replica_leases_lost", 0) == after.counters.get("trainer_leases_lost", 0) == 0
        assert after.policies[0].version > before.policies[0].version
    finally:
        for peer in peers:
            await peer.close()
        orchestrator.close()
