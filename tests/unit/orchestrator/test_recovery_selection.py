"""The SQL selection is sufficient: recovery from selected rows equals recovery from all rows, on random histories."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator import recovery
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import Row
from services.orchestrator.orchestrator import OrchestratorCore
from tests.unit.orchestrator.builders import failure, sequence, trajectory
from tests.unit.orchestrator.world import World
from tests.waiting import WAIT_S


class Plain:
    """The same questions, answered by walking over all rows."""

    @staticmethod
    def open_groups(reader: JournalReader) -> list[Row]:
        closed = {row.key for row in reader.rows() if row.kind == entries.CLOSED}
        return [row for row in reader.rows() if row.kind == entries.GROUP and row.key not in closed]

    @staticmethod
    def find_rows(reader: JournalReader, kind: str, keys: Iterable[str]) -> list[Row]:
        wanted = set(keys)
        return [row for row in reader.rows() if row.kind == kind and row.key in wanted]

    @staticmethod
    def rows_that_matter(found: recovery.Recovery) -> Iterator[Row]:
        dead = {entries.CLOSED, entries.STATE, entries.RUN, entries.VERDICT, entries.SET_ASIDE, "marks"}
        for row in found.reader.rows():
            name = row.key.rpartition("/")[0] if row.kind in (entries.TRAJECTORY, entries.FAILURE) else row.key
            of_group = row.kind in (entries.GROUP, entries.ASSIGNMENT, entries.TRAJECTORY, entries.FAILURE)
            if row.kind not in dead and not (of_group and name not in found.groups):
                yield row


def fingerprint(parts: OrchestratorCore) -> dict[str, Any]:
    experience = parts.experience
    return {
        "groups": {
            name: (group.position, dict(group.born), sorted(group.outcomes), group.num_lost)
            for name, group in parts.groups.items()
        },
        "accounts": {name: repr(account) for name, account in experience.admission.accounts.items()},
        "buffers": {
            name: ([(g.task_group_id, g.mean, g.std, g.size) for g in buffer.groups], buffer.version)
            for name, buffer in experience.buffers.items()
        },
        "since": repr(experience._since_batch),
        "buffered": dict(experience._buffered),
        "in_training": dict(experience._in_training),
        "replay": {name: [g.task_group_id for g in store.groups] for name, store in experience.replay.items()},
        "versions": {name: repr(ledger._versions) for name, ledger in parts.ledgers.items()},
        "batches": {
            name: (b.newest_step, b.newest_version, b.staleness_max, b.statistics) for name, b in parts.batches.items()
        },
        "counters": dict(parts.counters),
        "names": parts.names._next,
        "position": parts.training_orders.streams[""].curriculum.position,
        "curation": vars(parts.training_orders.streams[""].curation).get("_average"),
        "results": parts.evaluations.results,
        "passes": repr(parts.evaluations._passes),
        "owners": {name: owner.replica_id for name in parts.groups if (owner := parts.pool.owner(name)) is not None},
        "paused": parts.control.paused,
    }


async def live(world: World, rng: random.Random, num_actions: int) -> None:
    """Plays, fails, trains, loses replicas, evaluates and pauses, at random."""
    replica = world.join()
    for policy in world.policies:
        await world.publish(0, policy=policy)
    world.train()
    open_slots: list[tuple[str, int, tuple[str, ...]]] = []
    for number in range(num_actions):
        for order in await world.orders(replica):
            open_slots += [(order.task_group_id, i, order.policies or world.policies) for i in order.indices]
        action = rng.random()
        if action < 0.75 and open_slots:
            name, index, policies = open_slots.pop(rng.randrange(min(len(open_slots), 6)))
            version = max(0, min(b.newest_version for b in world.core.batches.values()))
            played = [sequence(float(rng.random() < 0.5), version, policy=policy) for policy in policies]
            record = failure(name, index) if rng.random() < 0.1 else trajectory(name, index, *played, reward=1.0)
            await world.send(record)
        elif action < 0.93:
            policy = rng.choice(world.policies)
            batches = world.core.batches[policy]
            step = batches.newest_version + 1
            if batches.newest_step >= step or (world.core.experience.buffers[policy].ready and step <= world.steps):
                await world.trainer_api.pull_batch(policy, step, WAIT_S)
                if rng.random() < 0.8:
                    await world.publish(step, policy=policy)
                    replica = world.join(number=min(b.newest_version for b in world.core.batches.values()))
        elif action < 0.96:
            await world.core.begin_evaluation(f"mine-{number}")
        else:
            world.core.write_state()
    await world.settle()


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_selected_brings_back_what_all_rows_bring_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_linger: None, seed: int
) -> None:
    rng = random.Random(seed)
    settings: list[dict[str, Any]] = [
        {},
        {"curation": "filter_solved"},
        {"policies": ("model0", "model1")},
        {"replay": {"ratio": 0.5, "capacity": 64, "max_staleness": 3}},
        {"late": "drop", "max_staleness": 2},
        {"policies": ("model0", "model1"), "rollout": {"admit": "any"}, "curation": "greso"},
    ]
    world = World(tmp_path, **settings[seed])
    world.steps = 12
    await world.crash()
    await live(world, rng, 90)
    await world.crash()
    selected = fingerprint(world.core)
    await world.settle()
    with monkeypatch.context() as plain:
        plain.setattr(recovery, "open_groups", Plain.open_groups)
        plain.setattr(JournalReader, "find_rows", Plain.find_rows)
        plain.setattr(recovery.Recovery, "rows_that_matter", Plain.rows_that_matter)
        plain.setattr(recovery.Recovery, "is_settled", lambda self, row: False)
        await world.crash()
    assert fingerprint(world.core) == selected
    assert world.core.batches["model0"].newest_step > 0
    await world.close()
