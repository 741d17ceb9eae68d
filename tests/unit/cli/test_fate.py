"""``rollmill fate``: each rollout has one fate after any events, and the sums agree."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.inspect.fate import Fate, Fates, Played, bands, mean_lengths, read_fates, show
from services.cli.inspect.plot import plot_runs
from services.common import records as fates
from services.common.errors import ConfigError
from services.common.records import ClosedReason, StopReason, TaskGroupOrder
from services.orchestrator.groups import RunState
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.members import Replica
from tests.unit.orchestrator.builders import failure, sequence, trajectory
from tests.unit.orchestrator.world import World, worlds_in

Worlds = Callable[..., World]


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[Worlds]:
    async with worlds_in(tmp_path) as make:
        yield make


async def begin(world: World) -> tuple[Replica, list[TaskGroupOrder]]:
    """The first task groups of four rollouts each."""
    replica = world.join()
    for policy in world.policies:
        await world.publish(0, policy=policy)
    world.train()
    return replica, await world.orders(replica)


async def bring(world: World, order: TaskGroupOrder, rewards: list[float], version: int = 0, tokens: int = 4) -> None:
    for index, reward in enumerate(rewards):
        await world.send(trajectory(order.task_group_id, index, sequence(reward, version, tokens), reward=reward))


def fates_of(world: World) -> Fates:
    found = read_fates(world.run_dir)
    assert found.failed_checks == []
    return found


async def test_every_kind_of_fate_is_told_and_the_sums_come_out(worlds: Worlds) -> None:
    world = worlds()
    replica, orders = await begin(world)
    assert len(orders) == 4
    failing, open_ = (order.task_group_id for order in orders[2:])
    await bring(world, orders[0], [0.0, 1.0, 0.0, 1.0], tokens=3)
    await bring(world, orders[1], [1.0, 1.0, 1.0, 1.0], tokens=7)
    await world.send(failure(failing, 0, "ROLLOUT_TIMEOUT"), failure(failing, 1, fates.TOO_OLD))
    await world.send(failure(failing, 2), failure(failing, 3, "ValueError"))
    await world.send(trajectory(open_, 0, sequence(1.0, num_tokens=9)))
    again = len(await world.orders(replica))  # what was dropped and failed returned its quota
    total = fates_of(world).total("model0")
    assert (total.groups.total(), total.rollouts.total()) == (4 + again, 4 * (4 + again))
    assert total.groups[Fate.BUFFERED] == total.groups[Fate.EQUAL_REWARDS] == total.groups[Fate.SIBLINGS] == 1
    assert total.rollouts[Fate.BUFFERED] == total.rollouts[Fate.EQUAL_REWARDS] == 4
    assert total.rollouts[Fate.TIMED_OUT] == total.rollouts[Fate.STOPPED] == total.rollouts[Fate.SIBLINGS] == 1
    assert total.rollouts[Fate.FAILED] == 2
    assert total.rollouts[Fate.PLAYING] == 3 + 4 * again
    assert total.tokens == {Fate.BUFFERED: 12, Fate.EQUAL_REWARDS: 28, Fate.SIBLINGS: 9}
    assert total.failures == {"ROLLOUT_TIMEOUT": 1, fates.TOO_OLD: 1, "INFRASTRUCTURE": 1, "ValueError": 1}


async def test_what_is_in_a_batch_is_trained_once_its_version_is_there(worlds: Worlds) -> None:
    world = worlds()
    _, orders = await begin(world)
    for order in orders[:2]:
        await bring(world, order, [0.0, 1.0, 0.0, 1.0])
    await world.trainer_api.pull_batch("model0", 1, 1.0)
    await world.settle()
    assert fates_of(world).total("model0").sequences == {Fate.IN_TRAINING: 8}
    await world.publish(1)
    await world.orders(world.join("b", number=1))
    await world.settle()
    await world.journal.close()
    for segment in [*(world.run_dir / "journal").glob(f"{entries.TRAJECTORY}-*")]:
        segment.unlink()  # as retention does: it changes nothing
    found = fates_of(world)
    assert found.total("model0").tokens == {Fate.TRAINED: 32}
    assert found.steps("model0")[1].rollouts[Fate.TRAINED] == 8, "of the step in which they were issued"
    assert set(found.steps("model0")) == {1, 2}, "what is issued from the next version on belongs to the next step"


async def test_no_closed_task_group_lacks_its_verdict_whenever_the_orchestrator_dies(worlds: Worlds) -> None:
    """A verdict is journaled ahead of the close that follows from it, once, also when the close is lost."""
    world = worlds()
    _, orders = await begin(world)
    await bring(world, orders[0], [1.0] * 4)
    await world.settle()
    with closing(JournalReader(world.run_dir / "journal")) as reader:
        rows = {row.kind: row.number for row in reader.rows() if row.key == orders[0].task_group_id}
    assert rows[entries.VERDICT] < rows[entries.CLOSED]
    await world.crash()
    await world.settle()
    with closing(JournalReader(world.run_dir / "journal")) as reader:
        assert [row.key for row in reader.rows_of(entries.VERDICT)] == [orders[0].task_group_id]


async def test_what_its_budget_cut_is_told_apart_from_its_siblings(worlds: Worlds) -> None:
    world = worlds(rollout={"on_truncation": "mask"})
    _, orders = await begin(world)
    for index in range(4):
        cut = StopReason.LENGTH if index == 0 else StopReason.STOP
        spoken = dataclasses.replace(sequence(index % 2, num_tokens=5 + index), stop_reason=cut)
        await world.send(trajectory(orders[0].task_group_id, index, spoken, reward=index % 2))
    total = fates_of(world).total("model0")
    assert total.tokens == {Fate.TRUNCATED: 5, Fate.BUFFERED: 6 + 7 + 8}
    assert total.groups[Fate.BUFFERED] == 1


async def test_what_waits_when_the_run_is_done_is_left_over_and_no_longer_in_flight(worlds: Worlds) -> None:
    world = worlds()
    _, orders = await begin(world)
    await bring(world, orders[0], [0.0, 1.0, 0.0, 1.0])
    assert fates_of(world).total("model0").sequences == {Fate.BUFFERED: 4}
    world.core.dispatcher.train = False
    world.core.cancel_training_groups(ClosedReason.STEPS_DONE)
    world.core.control.enter(RunState.FINISHED)
    await world.settle()
    total = fates_of(world).total("model0")
    assert total.sequences == {Fate.LEFT_OVER: 4}
    assert set(total.rollouts) == {Fate.LEFT_OVER, Fate.CANCELLED}


async def test_policies_are_told_apart_and_one_that_said_nothing_has_no_sequence(worlds: Worlds) -> None:
    world = worlds(policies=("solver", "checker"))
    _, orders = await begin(world)
    name = orders[0].task_group_id
    for index in range(4):
        spoken = [sequence(index % 2, policy="solver", num_tokens=4)]
        if index == 0:
            spoken += [sequence(1.0, policy="checker", num_tokens=2), sequence(0.0, policy="checker", num_tokens=3)]
        await world.send(trajectory(name, index, *spoken, reward=1.0))
    found = fates_of(world)
    assert found.policies == ["checker", "solver"]
    solver, checker = found.total("solver"), found.total("checker")
    assert (solver.sampled_sequences, solver.tokens.total()) == (4, 16)
    assert (checker.sampled_sequences, checker.tokens.total(), checker.rollouts[Fate.EMPTY]) == (2, 5, 3)


async def test_the_old_tokens_of_a_late_sequence_are_masked_and_the_young_ones_trained(worlds: Worlds) -> None:
    world = worlds(max_staleness=0, late="mask")
    _, orders = await begin(world)
    await world.publish(1)  # of a trainer that went on without them
    for order in orders[:2]:
        for index in range(4):
            both = dataclasses.replace(
                sequence(index % 2, 0, 3), segments=sequence(0, 0, 3).segments + sequence(0, 1, 2).segments
            )
            await world.send(trajectory(order.task_group_id, index, both, reward=index % 2))
    world.core.batches["model0"].newest_step = 1
    await world.trainer_api.pull_batch("model0", 2, 1.0)
    await world.publish(2)
    await world.settle()
    assert fates_of(world).total("model0").tokens == {Fate.TRAINED: 16, Fate.MASKED: 24}


async def train_two_groups(world: World) -> None:
    """One step, of all that was brought."""
    _, orders = await begin(world)
    for order in orders[:2]:
        await bring(world, order, [0.0, 1.0, 0.0, 1.0])
    await world.trainer_api.pull_batch("model0", 1, 1.0)
    await world.publish(1)
    await world.settle()


def change_batch(run_dir: Path, change: Callable[[dict[str, Any], int], dict[str, Any]], masked: int) -> None:
    """Write the only batch record anew."""
    from services.orchestrator.journal.segments import Packer, segment_path, write_header

    reader = JournalReader(run_dir / "journal")
    (row,) = reader.rows_of(entries.BATCH)
    record = reader.load(row)
    reader.close()
    assert record is not None
    record["sequences"] = [change(entry, number) for number, entry in enumerate(record["sequences"])]
    record["minibatches"][0]["num_trained_tokens"] -= masked
    payload = Packer().pack(orjson.dumps(record) + b"\n")
    path = segment_path(run_dir / "journal", row.kind, row.segment)
    path.write_bytes(write_header(row.number, row.written_at, row.key, payload) + payload)


async def test_a_sum_that_does_not_come_out_is_said(worlds: Worlds) -> None:
    """Here a batch names a sequence that no rollout brought, and tokens that were not sampled."""
    world = worlds()
    await train_two_groups(world)
    await world.journal.close()
    change_batch(world.run_dir, lambda e, n: {**e, "sequence_id": "gone/0/0"} if n == 0 else e, -5)
    found = read_fates(world.run_dir)
    assert [check.expected - check.found for check in found.failed_checks] == [1, 9]
    console = Console(record=True, width=120)
    show(found, console, policies=found.policies, step=None, last=5)
    told = console.export_text()
    assert "this does NOT add up" in told
    assert "fresh sequences in batches of model0 = those of its rollouts: 8 against 7" in told


async def test_a_record_that_cannot_be_read_is_counted_and_the_rest_is_told(worlds: Worlds) -> None:
    world = worlds()
    _, orders = await begin(world)
    for order in orders[:2]:
        await bring(world, order, [0.0, 1.0, 0.0, 1.0])
    await world.settle()
    (segment,) = (world.run_dir / "journal").glob(f"{entries.VERDICT}-*.zst")
    damaged = bytearray(segment.read_bytes())
    damaged[100] ^= 1
    segment.write_bytes(damaged)
    found = read_fates(world.run_dir)
    assert found.num_unreadable == 1
    total = found.total("model0")
    assert total.sequences == {Fate.BUFFERED: 4, Fate.UNKNOWN: 4}
    assert total.tokens.total() == 32, "the lengths are those of the trajectories"


def test_the_length_bias_is_the_trained_mean_over_the_played_one() -> None:
    played = [Played(1, Fate.TRAINED if length < 30 else Fate.TOO_OLD, length, 0) for length in (10, 20, 30)]
    assert mean_lengths(played) == (15.0, 20.0)
    assert [(band["quantiles"], band["sequences"]) for band in bands(played)] == [("p0-50", 2), (">p99", 1)]


async def test_the_command_prints_one_object_for_machines(worlds: Worlds) -> None:
    world = worlds()
    _, orders = await begin(world)
    await bring(world, orders[0], [0.0, 1.0, 0.0, 1.0])
    run = str(world.run_dir)
    answer = CliRunner().invoke(app, ["fate", run, "--json"])
    told = json.loads(answer.output.splitlines()[-1])
    assert told["adds_up"] is True
    assert told["policies"]["model0"]["total"]["fates"]["waiting_for_a_batch"]["tokens"] == 16
    assert told["policies"]["model0"]["steps"][0]["step"] == 1
    tables = CliRunner().invoke(app, ["fate", run, "--step", "1"])
    assert "in flight: waiting for a batch" in tables.output
    refused = CliRunner().invoke(app, ["fate", run, "--step", "9"])
    assert isinstance(refused.exception, ConfigError)
    refused = CliRunner().invoke(app, ["fate", run, "--policy", "nobody"])
    assert isinstance(refused.exception, ConfigError)


async def test_the_picture_of_one_run_shows_its_fates(worlds: Worlds, tmp_path: Path) -> None:
    world = worlds()
    await train_two_groups(world)
    picture = plot_runs([world.run_dir], tmp_path / "with.png")
    assert picture is not None
    assert int.from_bytes(picture.read_bytes()[20:24], "big") > 1000, "higher than the curves alone, which have 840"
