"""A trainer over two nodes, both on this machine: the reaction of one to a failure of the other.

That two nodes compute what one rank computes is shown by the gradient tests, and that they come back by the e2e tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.cli.run.processes import ForkServer
from services.common.system.child import START_AGAIN
from tests.integration.trainer_service.conftest import MakeOrchestrator, TrainerProcess
from tests.integration.trainer_service.orchestrating import FakeOrchestrator
from tests.ports import free_port
from tests.unit.trainer_service.building import POLICY

pytestmark = pytest.mark.slow

Nodes = list[TrainerProcess]


@pytest.fixture
def nodes(forks: ForkServer) -> Iterator[Callable[..., Nodes]]:
    """Makes the launchers of two nodes with one rank each, and ends their processes."""
    made: Nodes = []

    def make(orchestrator: FakeOrchestrator, run_dirs: list[Path], *more: str) -> Nodes:
        port = free_port()
        for node, run_dir in enumerate(run_dirs):
            place = ["--num-nodes=2", f"--node-rank={node}", f"--rendezvous-port={port}", "--interface=lo"]
            launch = ["--num-ranks=1", *place, *more]
            made.append(TrainerProcess(orchestrator, run_dir, launch=launch, name=f"node{node}", forks=forks))
        return made

    yield make
    for node in made:
        node.close()


def start(nodes: Nodes) -> None:
    for node in nodes:
        node.start()


async def codes(nodes: Nodes) -> list[int]:
    return list(await asyncio.gather(*(node.wait() for node in nodes)))


def errors(nodes: Nodes) -> str:
    return "\n".join(f"--- {node.name}\n{node.errors}" for node in nodes)


async def test_a_node_that_gets_a_signal_ends_the_others_with_a_checkpoint(
    make_orchestrator: MakeOrchestrator, nodes: Callable[..., Nodes]
) -> None:
    """The run is not over for the other node: its process asks for a restart, and then waits for the one that left."""
    orchestrator = await make_orchestrator(run={"steps": 4}, trainer={"checkpoint_every": 100})
    both = nodes(orchestrator, [orchestrator.run_dir] * 2)
    start(both)
    await orchestrator.until(lambda: orchestrator.newest >= 1, "nothing was trained")
    both[1].terminate()
    assert await codes(both) == [START_AGAIN, 0], errors(both)
    assert "the ranks of another node got a signal to leave; a checkpoint is written" in both[0].errors
    assert len(list((orchestrator.run_dir / "checkpoints" / POLICY).glob("step_*"))) == 1


async def test_a_node_that_falls_silent_is_named_and_the_others_leave(
    make_orchestrator: MakeOrchestrator, nodes: Callable[..., Nodes]
) -> None:
    """Stopped, not killed: no connection is closed, as when a machine loses its power."""
    orchestrator = await make_orchestrator(run={"steps": 4})
    orchestrator.held_step = 2
    both = nodes(orchestrator, [orchestrator.run_dir] * 2, "--node-timeout-s=4")
    start(both)
    await orchestrator.until(lambda: 2 in orchestrator.pulls, "step 2 was never asked for")
    os.killpg(both[1].pid, signal.SIGSTOP)
    assert await both[0].wait() == START_AGAIN, both[0].errors
    assert "trainer: node 1 sent no heartbeat for 4 s; ending the ranks of this node" in both[0].errors


async def test_nodes_without_a_common_directory_are_refused_with_a_message(
    make_orchestrator: MakeOrchestrator, nodes: Callable[..., Nodes], tmp_path: Path
) -> None:
    orchestrator = await make_orchestrator(run={"steps": 4})
    both = nodes(orchestrator, [orchestrator.run_dir, tmp_path / "elsewhere"])
    start(both)
    assert await codes(both) == [2, 2], errors(both)
    for node in both:
        assert "rank 1: on " in node.errors
        assert f"{tmp_path / 'elsewhere'}/checkpoints/{POLICY} is not the directory" in node.errors
    assert orchestrator.ledger == {}
