"""``rollmill trace`` on a run of real processes: orchestrator and replicas, with a scripted engine and a scripted trainer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from benchmarks._peers import ScriptedTrainer
from services.cli.__main__ import app
from services.cli.inspect.fate import Fate, read_fates
from services.cli.inspect.run_model import GroupFacts
from services.cli.inspect.trace import choose, counted, events, read_group, read_groups, stages
from services.cli.run.processes import ForkServer
from services.common.errors import ConfigError
from services.common.system.child import module_command
from tests.integration.orchestrator.conftest import Orchestrator
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow

NUM_STEPS = 3
SLOTS = 4


def reward(task: Mapping[str, Any], completion: str) -> float:
    """Rows 0, 3, 6, … bring different rewards, rows 1, 4, 7, … equal ones, and rows 2, 5, 8, … fail."""
    row = int(task["question"].removeprefix("q"))
    if row % 3 == 2:
        raise ValueError("this reward is broken")
    return 1.0 if row % 3 == 1 else len(completion) / 1000


class Replica:
    """A real inference service with the scripted engine."""

    def __init__(self, forks: ForkServer, orchestrator: Orchestrator, name: str) -> None:
        arguments = ["--name", name, "--replica-id", name, "--orchestrator", orchestrator.address]
        process = forks.start(
            module_command("services.inference", *arguments),
            {**os.environ, "OMP_NUM_THREADS": "1"},
            orchestrator.run_dir / f"{name}.out",
        )
        assert process is not None, "the fork server has ended"
        self._process = process

    def kill(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(WAIT_S)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Iterator[Path]:
    """A run in which a replica was killed during rollouts, and then the orchestrator."""
    directory = tmp_path_factory.mktemp("trace") / "run"
    orchestrator = Orchestrator(
        directory,
        run__steps=NUM_STEPS + 100,  # it does not end by itself: both are there when they are asked
        evaluation={"at_start": False, "at_end": False},
        policies={
            "model0": {"model": {"path": "unused", "context_length": 512}, "batch": {"size": SLOTS, "max_staleness": 1}}
        },
        workflow={"name": "single_turn", "settings": {"reward": "tests.e2e.test_trace:reward"}},
        sampling={"max_new_tokens": 64},
        metrics={"enabled": True},
        orchestrator__retention="all",
        inference={"a": {"engine": "scripted", "port": 0, "num_slots": 8, "scripted": {"latency_s": 0.4}}},
    )
    replicas: list[Replica] = []
    try:
        asyncio.run(_play(orchestrator, replicas, forks))
        yield directory
    finally:
        for replica in replicas:
            replica.kill()
        orchestrator.close()


async def _play(orchestrator: Orchestrator, replicas: list[Replica], forks: ForkServer) -> None:
    await orchestrator.start()
    trainer = ScriptedTrainer(orchestrator.address, train_s=0.05)
    try:
        async with asyncio.timeout(60):
            training = asyncio.ensure_future(trainer.run(NUM_STEPS))
            replicas.append(Replica(forks, orchestrator, "a"))
            await orchestrator.until(lambda now: any(r.num_running for r in now.replicas))
            replicas[0].kill()  # it plays its first task groups, and takes them along
            replicas.append(Replica(forks, orchestrator, "b"))
            await orchestrator.until(lambda now: now.policies[0].version >= 1)
            await orchestrator.restart()
            await training
            await _scrape(orchestrator.run_dir)
    finally:
        await trainer.close()
    orchestrator.kill()
    replicas[1].kill()


async def _scrape(run_dir: Path) -> None:
    """Keep the metrics of both processes while they run."""
    async with aiohttp.ClientSession() as session:
        for file in (run_dir / "prometheus").glob("*.json"):
            (target,) = json.loads(file.read_text())
            if file.stem == "inference-a":  # it was killed, and could not take its entry away
                continue
            async with session.get(f"http://{target['targets'][0]}/metrics") as response:
                (run_dir / f"{file.stem}.scraped").write_text(await response.text())


def scraped(run_dir: Path, process: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families((run_dir / f"{process}.scraped").read_text()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def group_that_is(run_dir: Path, state: str, **more: Any) -> GroupFacts:
    lines = [
        line
        for line in choose(read_groups(run_dir), state=state, last=1000)
        if all(line[k] == v for k, v in more.items())
    ]
    assert lines, f"no task group is {state}: {counted(read_groups(run_dir))}"
    return read_group(run_dir, lines[-1]["task_group_id"])


def happened(facts: GroupFacts) -> list[str]:
    return [event.what for event in events(facts, with_slots=True)]


def test_a_trained_group_shows_every_stage_from_prompt_to_gradient(run_dir: Path) -> None:
    facts = group_that_is(run_dir, "trained")
    assert facts.complete
    assert [stage.name for stage in stages(facts)] == [
        *("to the replica", "waiting for a slot", "playing", "to the journal"),
        *("waiting for a batch", "to the trainer", "training", "publishing"),
    ]
    what = happened(facts)
    wanted = [
        "issued",
        "accepted",
        "slot_started",
        "generate",
        "slot_finished",
        "slot_sent",
        "slot_durable",
        "complete",
    ]
    wanted += ["advantage_group_kept", "batch", "pulled", "training", "trained", "published"]
    assert [what.index(name) for name in wanted] == sorted(what.index(name) for name in wanted)
    for slot in facts.slots.values():
        (generated,) = [phase for phase in slot.phases if phase.what == "generate"]
        assert generated.num_tokens == slot.sequences[0].num_trained_tokens > 0
        assert generated.seconds >= 0.4  # the engine's latency
        assert slot.accepted_at <= slot.started_at <= slot.finished_at <= slot.sent_at <= slot.durable_at
    (use,) = facts.uses
    assert use.num_sequences == SLOTS
    assert use.loss is not None


def test_a_group_whose_replica_was_killed_shows_the_loss_and_who_played_it(run_dir: Path) -> None:
    groups = [facts for facts in read_groups(run_dir) if len(facts.assignments) > 1]
    assert groups
    facts = read_group(run_dir, groups[0].task_group_id)
    assert [assignment.replica_id for assignment in facts.assignments] == ["a", "b"]
    what = happened(facts)
    assert "replica.lease_lost" in what
    lost = ["issued", "task_group.orphaned", "reissued", "accepted"]
    assert [what.index(name) for name in lost] == sorted(what.index(name) for name in lost)
    assert {slot.replica_id for slot in facts.slots.values()} == {"b"}
    assert next(stage.name for stage in stages(facts)) == "lost with a replica"


def test_every_rollout_of_a_run_that_was_killed_has_one_fate_and_the_sums_come_out(run_dir: Path) -> None:
    """A replica died with its task groups, and the orchestrator twice; the trace of each group says the same."""
    found = read_fates(run_dir)
    assert found.failed_checks == []
    total = found.total("model0")
    groups = read_groups(run_dir)
    assert total.groups.total() == len(groups)
    by_status = counted(groups)
    assert total.groups[Fate.TRAINED] == by_status["trained"] >= NUM_STEPS
    assert total.groups[Fate.EQUAL_REWARDS] == by_status["filtered"]
    assert total.groups[Fate.FAILED] == by_status["failed"]
    assert total.groups[Fate.UNKNOWN] == 0
    assert total.failures == {"ValueError": total.rollouts[Fate.FAILED]}
    told = CliRunner().invoke(app, ["fate", str(run_dir)], env={"COLUMNS": "160"})
    assert "it adds up" in told.output
    assert f"{total.rollouts[Fate.FAILED]} rollouts ended in a failure: ValueError" in told.output


def test_the_command_tells_people_machines_and_draws(run_dir: Path, tmp_path: Path) -> None:
    name = group_that_is(run_dir, "trained").task_group_id
    run = CliRunner().invoke
    picture = tmp_path / "trace.svg"
    told = run(app, ["trace", str(run_dir), name, "--phases", "-o", str(picture)], env={"COLUMNS": "200"})
    assert told.exit_code == 0, told.output
    assert "where the time went" in told.output
    assert "generate" in told.output
    assert "█" in told.output and picture.read_text().startswith("<svg")
    refused = run(app, ["trace", str(run_dir), name, "-o", str(tmp_path / "trace.png")])
    assert isinstance(refused.exception, ConfigError) and "ends in .svg" in refused.exception.message
    as_json = json.loads(run(app, ["trace", str(run_dir), name, "--json"]).output)
    assert as_json["status"] == "trained"
    assert sum(stage["seconds"] for stage in as_json["stages"]) > 0
    listed = json.loads(
        run(app, ["trace", str(run_dir), "--list", "--sort", "slowest", "--step", "1", "--json"]).output
    )
    assert {line["training_step"] for line in listed["task_groups"]} == {1}
    assert "task groups: " in run(app, ["trace", str(run_dir), "--list"]).output
    with pytest.raises(ConfigError, match="--list"):
        read_group(run_dir, "nobody-00000001")


def test_prometheus_hears_of_every_process_what_it_has_done(run_dir: Path) -> None:
    orchestrator, replica = scraped(run_dir, "orchestrator"), scraped(run_dir, "inference-b")
    assert orchestrator["rollmill_weight_version"] == {("model0",): NUM_STEPS}
    assert orchestrator["rollmill_replica_slots"] == {("b",): 8}
    assert orchestrator["rollmill_journal_records_total"][()] > 0  # since it was started again
    assert replica["rollmill_tokens_generated_total"]["model0",] > 0
    assert replica["rollmill_failed_rollouts_total"][()] >= SLOTS
    assert replica["rollmill_records_acknowledged_total"]["accepted",] >= NUM_STEPS * SLOTS
    for found in (orchestrator, replica):
        assert "rollmill_other" not in found
        seconds, lanes = found["rollmill_activity_seconds_total"], found["rollmill_activity_lanes"]
        assert seconds and lanes
