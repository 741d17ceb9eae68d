"""A replica's weights side as a process of its own, which can be told to stand still in the middle of a write."""

from __future__ import annotations

import asyncio
import threading
from multiprocessing.connection import Connection

from services.common.weights.codec import ChunkChange
from services.common.weights.snapshot import Bits, tensor_digest
from services.inference.weights.mirror import Mirror
from tests.integration.weights.test_transfer_faults import POLICY, RecordingEngine, updater
from tests.waiting import until


def replica(pipe: Connection, way: str, stand_still_at: int) -> None:
    """Takes every version that comes through the pipe and answers with its tensors' digests; stops in mid-write of one."""
    asyncio.run(_replica(pipe, way, stand_still_at))


async def _replica(pipe: Connection, way: str, stand_still_at: int) -> None:
    mirror = Mirror(POLICY)
    follower = updater(mirror, RecordingEngine(), way)
    running = asyncio.create_task(follower.run())
    while (version := await asyncio.to_thread(pipe.recv)) is not None:
        if version.number == stand_still_at:
            _stop_in_the_next_write(pipe)
        follower.offer(version)
        await until(lambda digest=version.digest: follower.held().digest == digest)  # type: ignore[misc]
        pipe.send({name: tensor_digest(bits) for name, bits in mirror.host_arrays().items()})
    running.cancel()


def _stop_in_the_next_write(pipe: Connection) -> None:
    write_to = ChunkChange.write_to

    def half(self: ChunkChange, target: Bits) -> None:
        assert self.positions is not None
        middle = len(self.positions) // 2
        positions, values = self.positions[:middle], self.values[:middle]
        write_to(ChunkChange(start=self.start, positions=positions, values=values, num_changes=middle), target)
        pipe.send("half")
        threading.Event().wait()

    ChunkChange.write_to = half  # type: ignore[method-assign]
