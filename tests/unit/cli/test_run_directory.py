"""The directory of a run: a new one for each run, the one that a launch goes on with, and changes of its settings."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.inspect.run_state import processes_left
from services.cli.run import directory as run_directory
from services.cli.run import launch as run
from services.cli.run.directory import choose, differences, prepare, save_changes, with_changes, with_other_ports
from services.cli.watch import reach
from services.common.checkpoints import path_of
from services.common.config.loading import load_recipe, load_resolved, save_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.system.machine import free_ports
from services.common.telemetry.metrics import MetricsWriter, RowKind
from tests.waiting import WAIT_S

REPOSITORY = Path(__file__).resolve().parents[3]
QUICKSTART = REPOSITORY / "recipes/quickstart"


def quickstart(runs: Path, *overrides: str) -> Recipe:
    return load_recipe(QUICKSTART, [f"run.dir={runs}", *overrides], {})


def test_runs_that_start_in_the_same_second_share_no_directory(tmp_path: Path) -> None:
    recipe = quickstart(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        prepared = list(pool.map(lambda _: prepare(recipe), range(8)))
    assert len({directory for _, directory in prepared}) == 8
    for resolved, directory in prepared:
        assert resolved.run.id == directory.name
        assert load_resolved(directory) == resolved


def test_a_name_that_is_taken_is_told_with_both_ways_on(tmp_path: Path) -> None:
    prepare(quickstart(tmp_path, "run.id=mine"))
    with pytest.raises(ConfigError, match=r"choose another name with --set run\.id=NAME, or go on with it"):
        prepare(quickstart(tmp_path, "run.id=mine"))


def test_a_directory_that_cannot_be_made_is_told_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/mine cannot be written \(Not a directory\).*--set run.dir="):
        prepare(quickstart(tmp_path / "file", "run.id=mine"))


def test_a_disk_that_was_full_is_not_in_the_way_of_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = quickstart(tmp_path, "run.id=mine")

    def full(recipe: Recipe, run_dir: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(run_directory, "save_resolved", full)
        with pytest.raises(ConfigError, match=r"mine cannot be written \(No space left on device\)"):
            prepare(recipe)
    assert load_resolved(prepare(recipe)[1]).run.id == "mine"


def test_keys_that_cannot_be_used_leave_no_directory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_KEYS", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere, which does not exist"):
        prepare(quickstart(tmp_path / "runs", "run.id=mine"))
    assert not (tmp_path / "runs").exists()


def taken(port: int) -> socket.socket:
    """A listener of another program."""
    return socket.create_server(("127.0.0.1", port))


def test_a_chosen_port_that_another_program_took_meanwhile_is_replaced(tmp_path: Path) -> None:
    first, directory = prepare(quickstart(tmp_path))
    told = Console(file=io.StringIO(), width=300)
    with taken(first.orchestrator.port):
        recipe, _ = run_directory.reopen(directory, wait_s=0)
        moved = with_other_ports(recipe, directory, told)
    assert moved.orchestrator.port not in (0, first.orchestrator.port)
    assert load_resolved(directory) == moved
    others = moved.model_copy(update={"orchestrator": first.orchestrator})
    assert others == first, "the other ports stay"
    assert isinstance(told.file, io.StringIO)
    assert f"orchestrator.port: another program has taken port {first.orchestrator.port}" in told.file.getvalue()


def test_a_port_that_the_user_named_is_not_replaced(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    recipe, directory = prepare(quickstart(tmp_path, f"orchestrator.port={port}"))
    with taken(port):
        with pytest.raises(ConfigError, match=f"orchestrator.port: port {port} is in use"):
            run_directory.reopen(directory, wait_s=0)
        assert with_other_ports(recipe, directory, Console(file=io.StringIO())) == recipe


def test_ports_are_kept_while_a_process_of_the_last_launch_is_left(tmp_path: Path) -> None:
    first, directory = prepare(quickstart(tmp_path))
    (directory / "logs").mkdir()
    with (directory / "logs" / "trainer-model0.stderr").open("w") as output:
        left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=output)
    try:
        assert processes_left(directory) == [left.pid]
        with taken(first.orchestrator.port), pytest.raises(ConfigError, match="is in use"):
            run_directory.reopen(directory, wait_s=0)
    finally:
        left.kill()
        left.communicate(timeout=WAIT_S)
    assert processes_left(directory) == []


def test_a_run_that_ended_while_its_launch_was_waited_for_does_not_go_on(tmp_path: Path) -> None:
    resolved, directory = prepare(quickstart(tmp_path))
    lock = run_directory.launcher_lock(directory)
    lock.__enter__()

    def end() -> None:
        (directory / "summary.json").write_text('{"state": "finished"}')
        lock.__exit__(None, None, None)

    ending = threading.Timer(0.3, end)
    ending.start()
    with pytest.raises(ConfigError, match="all its training steps are done"):
        run_directory.reopen(directory, wait_s=30)
    ending.join(WAIT_S)
    with pytest.raises(ConfigError, match="all its training steps are done"):
        run.run(resolved, directory, Console(file=io.StringIO()))


def test_of_two_launchers_one_gets_the_run(tmp_path: Path) -> None:
    resolved, directory = prepare(quickstart(tmp_path))
    with run_directory.launcher_lock(directory):
        with pytest.raises(ConfigError, match=f"is in use .launcher, pid {os.getpid()}.*\\nis the run still going"):
            run_directory.reopen(directory, wait_s=0)
        with pytest.raises(ConfigError, match="in use by another launcher"):
            run.run(resolved, directory, Console(file=io.StringIO()))
    assert run_directory.reopen(directory, wait_s=0)[1] == directory


def test_a_command_that_calls_a_run_makes_no_keys_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLMILL_KEYS", raising=False)
    _, directory = prepare(quickstart(tmp_path, "security.tls=on"))
    with pytest.raises(ConfigError, match="set ROLLMILL_KEYS to the directory it was started with"):
        reach(directory, None)
    assert not (directory / "keys").exists()


def test_what_a_killed_trainer_left_of_its_weights_goes_with_the_launcher(tmp_path: Path) -> None:
    spill = tmp_path / "snapshots"
    spill.mkdir()
    dead, alive = (
        spill / f"rollmill.run.model0.3.{pid}.weights" for pid in (4194304, os.getpid())
    )  # one beyond all pids
    for left in (dead, alive):
        left.touch()
    run._sweep(tmp_path)
    assert not dead.exists() and alive.exists()


# --- which run goes on


def begun(recipe: Recipe, name: str, at: float) -> Path:
    """The directory of a run that was begun at a time."""
    _, directory = prepare(recipe.model_copy(update={"run": recipe.run.model_copy(update={"id": name})}))
    os.utime(directory / "recipe.json", (at, at))
    return directory


def end(run_dir: Path, state: str) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"state": state}))


def test_without_being_asked_each_launch_is_a_new_run(tmp_path: Path) -> None:
    recipe = quickstart(tmp_path)
    begun(recipe, "first", 1)
    assert choose(recipe, asked=False) == (None, "")


@pytest.mark.parametrize("asked", [True, False], ids=["--resume auto", "run.resume: auto"])
def test_the_newest_run_that_has_not_ended_goes_on(tmp_path: Path, asked: bool) -> None:
    recipe = quickstart(tmp_path, *(() if asked else ("run.resume=auto",)))
    begun(recipe, "old", 1)
    newest = begun(recipe, "new", 3)
    end(begun(recipe, "finished", 4), "finished")
    end(begun(recipe, "stopped", 5), "stopped")
    run_dir, told = choose(recipe, asked=asked)
    assert run_dir == newest
    assert "the newest run of quickstart that has not ended" in told and "\n" not in told
    assert ("--resume auto" if asked else "run.resume: auto") in told


def test_without_any_a_new_one_begins_and_says_so(tmp_path: Path) -> None:
    run_dir, told = choose(quickstart(tmp_path / "none"), asked=True)
    assert run_dir is None and f"there is none in {tmp_path / 'none'}" in told
    end(begun(quickstart(tmp_path), "done", 1), "finished")
    assert f"{tmp_path / 'done'} is over (finished)" in choose(quickstart(tmp_path), asked=True)[1]


def test_a_run_with_other_settings_is_left_alone_and_the_setting_named(tmp_path: Path) -> None:
    begun(quickstart(tmp_path, "run.steps=7"), "other", 1)
    run_dir, told = choose(quickstart(tmp_path, "run.steps=8"), asked=True)
    assert run_dir is None
    assert f"{tmp_path / 'other'} is left alone: run.steps is 7 there and 8 here" in told


def test_what_a_launch_filled_in_is_no_other_setting(tmp_path: Path) -> None:
    recipe = quickstart(tmp_path)
    resolved, _ = prepare(recipe)
    assert recipe.orchestrator.port == 0 and resolved.orchestrator.port != 0
    assert differences(resolved, recipe) == []
    tree: dict[str, Any] = resolved.model_dump(mode="json")
    tree["orchestrator"]["host"] = "192.0.2.7"  # as over several nodes
    assert differences(Recipe.model_validate(tree), recipe) == []
    wanted = quickstart(tmp_path, "orchestrator.port=50051")
    assert [line.partition(" ")[0] for line in differences(resolved, wanted)] == ["orchestrator.port"]


def test_passwords_are_not_told(tmp_path: Path) -> None:
    uri = "envgateway.queue.redis_uri=redis://me:{}@{}:6379"
    there, here = (quickstart(tmp_path, uri.format("secret", host)) for host in ("one", "two"))
    assert differences(there, here) and "secret" not in str(differences(there, here))


def test_damaged_and_foreign_directories_are_skipped_with_the_reason(tmp_path: Path) -> None:
    recipe = quickstart(tmp_path)
    good = begun(recipe, "good", 1)
    begun(recipe, "copied", 2).rename(tmp_path / "copy")
    for name, text in (("quickstart-half", '{"name": "quicks'), ("quickstart-other", '{"name": "quickstart", "a": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text(text)
    (tmp_path / "quickstart-empty").mkdir()
    begun(load_recipe(REPOSITORY / "recipes/quickstart-code", [f"run.dir={tmp_path}"], {}), "another-recipe", 9)
    assert choose(recipe, asked=True)[0] == good
    end(good, "finished")
    told = choose(recipe, asked=True)[1]
    assert f"{tmp_path / 'copy'} is left alone: its recipe.json is that of run copied" in told
    assert "quickstart-half is left alone: " in told and "recipe.json cannot be read (Unterminated string" in told
    assert "quickstart-other is left alone: " in told and "recipe.json cannot run: " in told
    assert "another-recipe" not in told and "quickstart-empty" not in told and "\n" not in told


def test_a_recipe_that_names_its_run_goes_on_with_that_one_alone(tmp_path: Path) -> None:
    mine = begun(quickstart(tmp_path), "mine", 1)
    begun(quickstart(tmp_path), "newer", 2)
    assert choose(quickstart(tmp_path, "run.id=mine"), asked=True)[0] == mine


@pytest.mark.parametrize("arguments", [[str(QUICKSTART), "--resume", "here"], ["--resume", "auto"], []])
def test_a_recipe_and_a_run_directory_at_once_and_neither_are_refused(arguments: list[str]) -> None:
    error = CliRunner().invoke(app, ["run", *arguments]).exception
    assert isinstance(error, ConfigError) and "name a recipe to start a run" in error.message


# --- changed settings


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "runs" / "quick"
    here = ["run.id=quick", f"run.dir={tmp_path / 'runs'}", "policies.model0.optimizer.total_updates=null"]
    recipe = load_recipe(QUICKSTART, here, {})
    save_resolved(recipe, directory)
    return directory


def begin(run_dir: Path, steps: int = 10, checkpoint: int = 10) -> Recipe:
    """The run has trained ``steps`` steps, and its newest checkpoint is of ``checkpoint``; 0 is none."""
    if checkpoint:
        path_of(run_dir / "checkpoints" / "model0", checkpoint).mkdir(parents=True)
    (run_dir / "metrics").mkdir()
    writer = MetricsWriter(run_dir / "metrics" / "orchestrator.jsonl")
    for step in range(1, steps + 1):
        writer.write(RowKind.TRAINING_STEP, policy="model0", step=step)
    writer.close()
    return load_resolved(run_dir)


@pytest.mark.parametrize(
    "override",
    [
        "run.steps=120",
        "policies.model0.optimizer.lr=5.0e-4",
        "policies.model0.trainer.max_mismatch=0.2",
        "workflow.settings.reward=recipes.quickstart.reward:other",
        "sampling.max_new_tokens=20",
        "evaluation.every=7",
        "rollout.timeout_s=99",
        "launch.restarts=1",
        "modules=[/elsewhere]",
        "data.train.max_prompt_tokens=100",
    ],
)
def test_what_the_records_do_not_depend_on_may_change(run_dir: Path, override: str) -> None:
    changed, changes = with_changes(begin(run_dir), run_dir, [override])
    key = override.partition("=")[0]
    save_changes(changed, run_dir, changes)
    assert load_resolved(run_dir) == changed
    assert changed != load_recipe(QUICKSTART, (), {})
    rows = [json.loads(line) for line in (run_dir / "recipe.changes.jsonl").read_text().splitlines()]
    assert key in [row["setting"] for row in rows] and all(row["from"] != row["to"] for row in rows)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("name=other", "name of the run"),
        ("run.id=other", "name of the run's directory"),
        ("run.dir=/elsewhere", "move its directory"),
        ("run.seed=2", "drawn with it"),
        ("run.steps=5", "has trained 10 steps: write 10 or more"),
        ("policies.model0.model.context_length=64", "checkpoints of the run"),
        ("policies.model0.algorithm.name=grpo", "replayed with the loss"),
        ("policies.model0.batch.size=32", "recorded batches"),
        ("policies.model0.weights.publish_dtype=bfloat16", "published versions"),
        ("rollout.group_size=4", "task groups"),
        ("sampling.temperature=0.7", "log-probabilities"),
        ("data.train.seed=3", "order of the run's tasks"),
        ("warm_start.model0.steps=3", "starting checkpoint"),
    ],
)
def test_what_the_records_depend_on_is_refused_with_the_reason(run_dir: Path, override: str, why: str) -> None:
    before = (run_dir / "recipe.json").read_bytes()
    with pytest.raises(ConfigError) as caught:
        with_changes(begin(run_dir), run_dir, [override])
    assert override.partition("=")[0] in caught.value.message and why in caught.value.message
    assert (run_dir / "recipe.json").read_bytes() == before


@pytest.mark.parametrize(
    ("checkpoint", "told"), [(7, "3 steps of model0 after its newest checkpoint (step 7)"), (0, "10 steps")]
)
@pytest.mark.parametrize(
    "override",
    [
        "policies.model0.optimizer.lr=5.0e-4",
        "policies.model0.batch.max_staleness=2",
        "run.steps=120",  # the schedule spans the run
    ],
)
def test_a_training_step_does_not_change_while_recorded_batches_are_to_be_trained_again(
    run_dir: Path, override: str, checkpoint: int, told: str
) -> None:
    recipe = begin(run_dir, checkpoint=checkpoint)
    with pytest.raises(ConfigError) as caught:
        with_changes(recipe, run_dir, [override])
    assert told in caught.value.message and "Ctrl-C, which writes a checkpoint" in caught.value.message
    assert override.partition("=")[0] in caught.value.message


@pytest.mark.parametrize("settings", [{"schedule": "constant"}, {"total_updates": 85}])
def test_a_learning_rate_that_is_constant_or_has_its_own_end_does_not_depend_on_the_number_of_steps(
    run_dir: Path, settings: dict[str, str | int]
) -> None:
    recipe = begin(run_dir, checkpoint=7)
    tree = recipe.model_dump(mode="json")
    tree["policies"]["model0"]["optimizer"].update(settings)
    assert with_changes(Recipe.model_validate(tree), run_dir, ["run.steps=120"])[0].run.steps == 120


def test_before_a_run_has_begun_only_its_name_and_place_are_fixed(run_dir: Path) -> None:
    changed, _ = with_changes(load_resolved(run_dir), run_dir, ["run.seed=2", "rollout.group_size=4"])
    assert (changed.run.seed, changed.rollout.group_size) == (2, 4)
    with pytest.raises(ConfigError, match="move its directory"):
        with_changes(load_resolved(run_dir), run_dir, ["run.dir=/elsewhere"])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("workflow.settings.reward=recipes.quickstart.reward:nothing", "'nothing'"),
        ("run.steps=many", "run.steps"),
    ],
)
def test_a_wrong_change_is_refused_as_in_a_new_run_and_nothing_is_written(
    run_dir: Path, override: str, told: str
) -> None:
    begin(run_dir)
    before = (run_dir / "recipe.json").read_bytes()
    done = CliRunner().invoke(app, ["run", "--resume", str(run_dir), "--set", override])
    assert isinstance(done.exception, ConfigError) and told in done.exception.message
    assert (run_dir / "recipe.json").read_bytes() == before and not (run_dir / "recipe.changes.jsonl").exists()
