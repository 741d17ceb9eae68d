"""``rollmill checkpoints``, ``rollmill export`` and ``rollmill journal``: their output for whole, damaged and unreplayable records."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.cli.__main__ import app
from services.cli.inspect import checkpoints as found_in
from services.cli.run.evaluate import evaluation_recipe
from services.cli.watch import warnings_of
from services.common.checkpoints import (
    MANIFEST,
    Manifest,
    Piece,
    StoredTensor,
    encode,
    path_of,
    read_manifest,
    remove,
    set_aside,
    write_bytes,
    write_safetensors,
)
from services.common.config.loading import RESOLVED, load_recipe, save_resolved
from services.common.errors import ConfigError, CorruptDataError
from services.common.pb import run_pb2
from services.common.records import WeightVersion
from services.orchestrator.journal import entries
from services.orchestrator.journal.journal import Journal
from tests.unit.orchestrator.damage import flip as flip_record
from tests.unit.orchestrator.damage import rows
from tests.unit.orchestrator.world import World

REPOSITORY = Path(__file__).resolve().parents[3]
WEIGHT = "weights/causal_lm.w"


def write_checkpoint(run_dir: Path, policy: str, step: int, num_ranks: int = 2) -> Path:
    """A checkpoint of one weight, written by ``num_ranks`` ranks."""
    path = path_of(run_dir / "checkpoints" / policy, step)
    (path / "model").mkdir(parents=True)
    files = [write_bytes(path / "model" / "config.json", "model/config.json", b'{"dtype": "bfloat16"}')]
    for rank in range(num_ranks):
        for kind, tensor in (("weights", WEIGHT), ("optimizer", "exp_avg/causal_lm.w")):
            name = f"{kind}_{rank:05d}.safetensors"
            piece = Piece(
                tensor=tensor,
                dtype="float32",
                shape=(4,),
                first=4 * rank,
                count=4,
                data=lambda: [memoryview(bytes(16))],
            )
            files.append(write_safetensors(path / name, name, [piece], {}))
    whole = StoredTensor(dtype="float32", shape=(4 * num_ranks,))
    manifest = Manifest(
        run_id="r", policy=policy, training_step=step, num_updates=step, num_ranks=num_ranks, optimizer="adamw",
        written_at=1_700_000_000, tensors={WEIGHT: whole, "exp_avg/causal_lm.w": whole}, files=tuple(files),
    )  # fmt: skip
    write_bytes(path / MANIFEST, MANIFEST, encode(manifest))
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two checkpoints and a journal of versions up to 5 without batches."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / RESOLVED).write_text("{}")

    def version(number: int) -> dict[str, Any]:
        found = WeightVersion(policy="model0", number=number, digest=f"xxh3-128:{number:032d}")
        return entries.to_json(entries.VersionRecord(version=found))

    async def journal() -> None:
        written = Journal(directory / "journal")
        written.start()
        for number in range(6):
            await written.append(entries.VERSION, f"model0/{number}", version(number))
        await written.close()

    asyncio.run(journal())
    for step in (4, 5):
        write_checkpoint(directory, "model0", step)
    return directory


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def listed(run_dir: Path, *options: str) -> tuple[int, dict[str, dict[str, object]]]:
    result = invoke("checkpoints", run_dir, "--json", *options)
    found = json.loads(result.stdout[result.stdout.index("{\n") :])["checkpoints"]
    return result.exit_code, {Path(each["path"]).name: each for each in found}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_whole_checkpoints_are_listed_with_what_the_journal_still_has(run_dir: Path) -> None:
    code, found = listed(run_dir)
    assert code == 0 and list(found) == ["step_000004", "step_000005"]
    assert found["step_000004"]["replay"] == "no: the batch of step 5 is gone"
    assert found["step_000005"]["replay"] == "yes: 0 steps"
    assert found["step_000005"]["state"] == "sizes agree" and found["step_000005"]["num_ranks"] == 2
    code, found = listed(run_dir, "--verify")
    assert code == 0 and {each["state"] for each in found.values()} == {"verified"}
    text = invoke("checkpoints", run_dir).output
    assert "model0" in text and "--verify reads every byte" in text


@pytest.mark.parametrize("file", ["weights_00001.safetensors", "optimizer_00000.safetensors", "model/config.json"])
def test_verify_finds_a_flipped_bit_that_sizes_do_not_show(run_dir: Path, file: str) -> None:
    flip(run_dir / "checkpoints" / "model0" / "step_000005" / file)
    assert listed(run_dir)[0] == 0
    code, found = listed(run_dir, "--verify")
    assert code == 1 and found["step_000005"]["damaged"] and not found["step_000004"]["damaged"]
    assert file in str(found["step_000005"]["state"])
    assert found["step_000005"]["can_be_exported"] == file.startswith("optimizer")


@pytest.mark.parametrize("file", ["weights_00001.safetensors", MANIFEST])
def test_what_is_missing_or_cut_is_found_without_verifying(run_dir: Path, file: str) -> None:
    path = run_dir / "checkpoints" / "model0" / "step_000005" / file
    path.write_bytes(path.read_bytes()[:-1])
    assert listed(run_dir)[0] == 1
    path.unlink()
    result = invoke("checkpoints", run_dir)
    assert result.exit_code == 1 and file in result.output and "damaged" in result.output


@pytest.mark.parametrize("options", [(), ("--verify",)])
def test_what_the_trainer_removes_meanwhile_is_no_damage(
    run_dir: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on beside the command: its next save removes the oldest checkpoint."""

    def removing(path: Path) -> Manifest:
        manifest = read_manifest(path)
        if path.name == "step_000004":
            remove(path)
        return manifest

    monkeypatch.setattr(found_in, "read_manifest", removing)
    code, found = listed(run_dir, *options)
    assert code == 0 and list(found) == ["step_000005"]


def test_what_a_trainer_has_set_aside_is_listed_with_its_reason(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "model0" / "step_000005"
    (path / "optimizer_00000.safetensors").unlink()
    set_aside(path, "optimizer_00000.safetensors is missing")
    code, found = listed(run_dir)
    assert code == 1 and found["step_000005.damaged"]["state"] == "set aside: optimizer_00000.safetensors is missing"
    output = re.sub(r"\s+", " ", invoke("checkpoints", run_dir).output)
    assert f"its weights: rollmill export {run_dir} --policy model0 --step 5" in output


def test_a_run_without_checkpoints_and_a_directory_without_a_run_are_told_apart(run_dir: Path, tmp_path: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    assert invoke("checkpoints", run_dir).exit_code == 0
    result = invoke("export", run_dir)
    assert isinstance(result.exception, ConfigError) and "has no checkpoint yet" in result.exception.message
    result = invoke("checkpoints", tmp_path)
    assert isinstance(result.exception, ConfigError) and "is no run directory" in result.exception.message


def test_a_lost_journal_hides_no_checkpoint(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "journal")
    code, found = listed(run_dir)
    assert code == 0 and str(found["step_000005"]["replay"]).startswith("unknown: the journal cannot be read")


def test_the_newest_whole_checkpoint_is_exported(run_dir: Path, tmp_path: Path) -> None:
    result = invoke("export", run_dir)
    assert result.exit_code == 0, result.output
    target = run_dir / "export" / "model0-000005"
    assert json.loads((target / "rollmill_export.json").read_text())["training_step"] == 5
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors", "rollmill_export.json"}
    flip(run_dir / "checkpoints" / "model0" / "step_000005" / "weights_00000.safetensors")
    assert invoke("export", run_dir, "-o", tmp_path / "out").exit_code == 0
    assert json.loads((tmp_path / "out" / "rollmill_export.json").read_text())["training_step"] == 4


def test_a_named_step_is_exported_also_where_it_was_set_aside(run_dir: Path, tmp_path: Path) -> None:
    path = run_dir / "checkpoints" / "model0" / "step_000004"
    (path / "optimizer_00000.safetensors").unlink()
    set_aside(path, "optimizer_00000.safetensors is missing")
    assert invoke("export", run_dir, "--step", "4", "-o", tmp_path / "out").exit_code == 0
    flip(path.with_name("step_000004.damaged") / "weights_00000.safetensors")
    result = invoke("export", run_dir, "--step", "4", "-o", tmp_path / "other")
    assert isinstance(result.exception, CorruptDataError)
    assert "weights_00000.safetensors is damaged" in result.exception.message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--step", "9"], "no checkpoint of model0 at step 9; it has 4, 5"),
        (["--policy", "other"], "no checkpoints of a policy 'other'; it has those of model0"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(
    run_dir: Path, options: list[str], words: str
) -> None:
    result = invoke("export", run_dir, *options)
    assert isinstance(result.exception, ConfigError) and words in result.exception.message


def test_eval_takes_the_newest_checkpoint_of_a_run_that_has_no_final_weights(run_dir: Path) -> None:
    recipe = evaluation_recipe(load_recipe(REPOSITORY / "recipes/quickstart", (), {}), [str(run_dir)])
    exported = Path(str(recipe.policies["model0"].model.path))
    assert exported == (run_dir / "export" / "model0-000005").resolve()
    assert json.loads((exported / "rollmill_export.json").read_text())["training_step"] == 5


def test_eval_of_a_run_without_any_weights_says_when_they_come(tmp_path: Path) -> None:
    (tmp_path / RESOLVED).write_text("{}")
    with pytest.raises(ConfigError, match=r"no weights yet of model0: the first come at .*checkpoint_every"):
        evaluation_recipe(load_recipe(REPOSITORY / "recipes/quickstart", (), {}), [str(tmp_path)])


# --- the journal


def say(run_dir: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["journal", str(run_dir), *words], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def asked(run_dir: Path, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(say(run_dir, *words, "--json")[1].splitlines()[-1])
    return found


@pytest.fixture
async def run_with_journal(tmp_path: Path) -> Path:
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


def test_a_whole_journal_is_verified(run_with_journal: Path) -> None:
    code, said = say(run_with_journal, "verify")
    assert code == 0 and "every record is whole" in said
    found = asked(run_with_journal, "verify")
    assert found["records"]["batches"] == 2 and found["damage"] == [] and found["lost_numbers"] == []


@pytest.mark.parametrize("spoil", [flip_record, partial(flip_record, header=True)])
def test_a_damaged_record_is_named_and_the_exit_code_says_so(run_with_journal: Path, spoil: Any) -> None:
    row = spoil(run_with_journal, entries.BATCH, "model0/1")
    code, said = say(run_with_journal, "verify")
    assert code == 1 and f"{row.kind}-{row.segment:06d}" in said
    [span] = asked(run_with_journal, "verify")["damage"]
    assert (span["kind"], span["segment"]) == (row.kind, row.segment)
    assert asked(run_with_journal, "list", "--kind", "batches")["records"][0]["state"] == (
        "damaged" if spoil is flip_record else ""
    )


def test_records_are_listed_by_kind_key_and_number(run_with_journal: Path) -> None:
    versions = asked(run_with_journal, "list", "--kind", "versions")["records"]
    assert [row["key"] for row in versions] == ["model0/0", "model0/1", "model0/2"]
    [newest] = asked(run_with_journal, "list", "--kind", "versions", "--last", "1", "--content")["records"]
    assert newest["content"]["digest"] == "d2"
    assert asked(run_with_journal, "list", "--number", str(newest["number"]))["records"][0]["key"] == "model0/2"
    group = rows(run_with_journal, entries.GROUP)[0].key
    assert {row["kind"] for row in asked(run_with_journal, "list", "--key", group)["records"]} >= {
        "trajectories",
        "verdicts",
    }
    assert (
        "model0/2" in say(run_with_journal, "list")[1]
        and "no record matches" in say(run_with_journal, "list", "--key", "nothing")[1]
    )


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


def test_export_writes_rows_with_lists_of_numbers(run_with_journal: Path, tmp_path: Path) -> None:
    row = flip_record(run_with_journal, entries.TRAJECTORY, rows(run_with_journal, entries.TRAJECTORY)[0].key)
    output = tmp_path / "rows"
    code, said = say(run_with_journal, "export", "-o", str(output), "--kind", "trajectories")
    assert code == 0, said
    found = [json.loads(line) for line in (output / "trajectories.jsonl").read_text().splitlines()]
    assert len(found) == len(rows(run_with_journal, entries.TRAJECTORY)) - 1
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
