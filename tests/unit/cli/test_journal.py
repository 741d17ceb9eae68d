"""``rollmill journal``: its output for whole and for damaged journals, and its changes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.watch import warnings_of
from services.common.config.loading import save_resolved
from services.common.pb import run_pb2
from services.orchestrator.journal import entries
from tests.unit.orchestrator.damage import flip, rows
from tests.unit.orchestrator.world import World


def say(run_dir: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["journal", str(run_dir), *words], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def asked(run_dir: Path, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(say(run_dir, *words, "--json")[1].splitlines()[-1])
    return found


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """Two steps were trained; the orchestrator is gone."""
    world = World(tmp_path)
    await world.publish(0)
    world.train()
    for step in (1, 2):
        for order in await world.orders(world.join(number=step - 1)):
            await world.play(order, version=step - 1)
        await world.trainer_api.pull_batch("model0", step, 5.0)
        await world.publish(step)
    await world.settle()
    await world.close()
    save_resolved(world.core.recipe, tmp_path)
    return tmp_path


def test_a_whole_journal_is_verified(run: Path) -> None:
    code, said = say(run, "verify")
    assert code == 0 and "every record is whole" in said
    found = asked(run, "verify")
    assert found["records"]["batches"] == 2 and found["damage"] == [] and found["lost_numbers"] == []


@pytest.mark.parametrize("spoil", [flip, partial(flip, header=True)])
def test_a_damaged_record_is_named_and_the_exit_code_says_so(run: Path, spoil: Any) -> None:
    row = spoil(run, entries.BATCH, "model0/1")
    code, said = say(run, "verify")
    assert code == 1 and f"{row.kind}-{row.segment:06d}" in said
    [span] = asked(run, "verify")["damage"]
    assert (span["kind"], span["segment"]) == (row.kind, row.segment)
    assert asked(run, "list", "--kind", "batches")["records"][0]["state"] == ("damaged" if spoil is flip else "")


def test_records_are_listed_by_kind_key_and_number(run: Path) -> None:
    versions = asked(run, "list", "--kind", "versions")["records"]
    assert [row["key"] for row in versions] == ["model0/0", "model0/1", "model0/2"]
    [newest] = asked(run, "list", "--kind", "versions", "--last", "1", "--content")["records"]
    assert newest["content"]["digest"] == "d2"
    assert asked(run, "list", "--number", str(newest["number"]))["records"][0]["key"] == "model0/2"
    group = rows(run, entries.GROUP)[0].key
    assert {row["kind"] for row in asked(run, "list", "--key", group)["records"]} >= {"trajectories", "verdicts"}
    assert "model0/2" in say(run, "list")[1] and "no record matches" in say(run, "list", "--key", "nothing")[1]


async def test_a_batch_without_a_trajectory_is_set_aside_at_the_next_start_and_made_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.publish(0)
    world.train()
    for order in await world.orders(world.join()):
        await world.play(order)
    await world.trainer_api.pull_batch("model0", 1, 5.0)
    await world.close()
    for path in (tmp_path / "journal").glob("trajectories-*"):
        path.unlink()
    world.open()
    assert world.core.batches["model0"].newest_step == 0
    await world.settle()
    await world.close()
    noted = {one["key"]: one["reason"] for one in asked(tmp_path, "list", "--set-aside")["set_aside"]}
    assert noted["model0/1"] == "refused"
    assert "model0/1" in say(tmp_path, "list", "--set-aside")[1]


def test_export_writes_rows_with_lists_of_numbers(run: Path, tmp_path: Path) -> None:
    row = flip(run, entries.TRAJECTORY, rows(run, entries.TRAJECTORY)[0].key)
    output = tmp_path / "rows"
    code, said = say(run, "export", "-o", str(output), "--kind", "trajectories")
    assert code == 0, said
    found = [json.loads(line) for line in (output / "trajectories.jsonl").read_text().splitlines()]
    assert len(found) == len(rows(run, entries.TRAJECTORY)) - 1
    assert f"{found[0]['task_group_id']}/{found[0]['index']}" != row.key
    segment = found[0]["sequences"][0]["segments"][1]
    assert segment["token_ids"] == [0, 1, 2, 3] and len(segment["logprobs"]) == 4


def test_a_disk_that_fills_up_and_records_that_are_not_used_are_told() -> None:
    now = run_pb2.RunProgress()
    assert warnings_of(now) == []
    now.disk.free_bytes, now.disk.bytes_per_s, now.disk.full_in_s = 9 * 1024**3, 1024**3 / 3600, 32_400.0
    now.set_aside.add(kind="trajectories", reason="damaged", count=2)
    disk, aside = warnings_of(now)
    assert disk.startswith("disk full in 9 h at 1.0 GiB an hour (9.0 GiB free)")
    assert "2 trajectories (damaged)" in aside and "rollmill journal RUN list --set-aside" in aside
    now.disk.full_in_s = 60 * 3600.0
    assert len(warnings_of(now)) == 1
