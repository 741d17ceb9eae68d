"""How a run stands from its directory, the newest run as the default of commands, and commands to a run without processes."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from services.cli.__main__ import app
from services.cli.inspect.checkpoints import checkpoints_directory
from services.cli.inspect.run_model import open_journal
from services.cli.inspect.run_state import check_run_directory, launcher_lock, read_metrics, why_silent
from services.cli.inspect.standing import (
    INTERRUPTED,
    RUNNING,
    newest_run,
    read_transfers,
    show,
    standing,
    summarise,
)
from services.cli.inspect.trajectories import Wanted, read_trajectories
from services.cli.run import directory as run_directory
from services.cli.run.evaluate import evaluation_recipe
from services.cli.watch import ProgressView
from services.common.checkpoints import path_of
from services.common.config.loading import load_recipe, save_resolved
from services.common.errors import ConfigError, InfrastructureError
from services.common.pb import run_pb2
from services.common.records import WeightTransfer
from services.common.telemetry.metrics import MetricsWriter, RowKind

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def run_dir(tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs" / "quick", unused_tcp_port)


def make_run(directory: Path, port: int, *more: str) -> Path:
    overrides = [f"run.id={directory.name}", f"orchestrator.port={port}", *more]
    save_resolved(load_recipe(REPOSITORY / "recipes/quickstart", overrides, {}), directory)
    return directory


def train(run_dir: Path, steps: int) -> None:
    (run_dir / "metrics").mkdir()
    writer = MetricsWriter(run_dir / "metrics" / "orchestrator.jsonl")
    writer.write(RowKind.EVALUATION, name="start/greedy", mean_reward=0.2)
    for step in range(1, steps + 1):
        writer.write(RowKind.TRAINING_STEP, policy="model0", step=step, rollout_reward_mean=step / 10)
    writer.write(RowKind.EVALUATION, name="step-3/greedy", mean_reward=0.4)
    writer.close()


def end(run_dir: Path, state: str) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"state": state}))


def rollmill(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_run_without_processes_is_interrupted_and_tells_how_to_go_on(run_dir: Path) -> None:
    train(run_dir, 4)
    found = standing(run_dir)
    assert (found.state, found.steps, found.reward) == (INTERRUPTED, {"model0": 4}, 0.4)
    told = "\n".join(found.lines())
    assert "model0 step 4/170, rollout reward 0.400" in told
    assert "start/greedy: 0.200" in told and "step-3/greedy: 0.400" in told
    assert f"rollmill run --resume {run_dir}" in told
    path_of(checkpoints_directory(run_dir, "model0"), 5).mkdir(parents=True)  # beyond the last published version
    found = standing(run_dir)
    assert (found.steps, found.checkpoints) == ({"model0": 5}, {"model0": 5})
    with launcher_lock(run_dir):
        found = standing(run_dir)
    assert found.state == RUNNING and f"pid {os.getpid()}" in found.held_by
    assert "--resume" not in "\n".join(found.lines())


def test_an_evaluation_of_other_versions_than_its_step_says_so_in_the_status_and_the_line(run_dir: Path) -> None:
    (run_dir / "metrics").mkdir()
    writer = MetricsWriter(run_dir / "metrics" / "orchestrator.jsonl")
    versions = {"start": (0, 0), "step-4": (4, 8), "step-8": (8, 8)}
    progress = run_pb2.RunProgress()
    for name, (oldest, newest) in versions.items():
        played = {"versions": {"model0": oldest}, "newest_versions": {"model0": newest}}
        writer.write(RowKind.EVALUATION, name=f"{name}/{name}", mean_reward=0.2, **played)
        progress.evaluations.add(name=f"{name}/greedy", mean_reward=0.2, num_trajectories=5, **played)
    writer.close()
    told = "\n".join(standing(run_dir).lines())
    assert "step-4/step-4 (versions 4 to 8): 0.200" in told and "start/start: 0.200" in told
    assert "step-8/step-8: 0.200" in told
    output = io.StringIO()
    with ProgressView(Console(file=output, width=200), "run") as view:
        view.show(progress)
    assert "evaluation step-4/greedy (versions 4 to 8): 0.200 over 5" in output.getvalue()
    assert "evaluation step-8/greedy: 0.200 over 5" in output.getvalue()


def test_the_lock_of_a_run_on_a_read_only_disk_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def read_only(path: Path, flags: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return really(path, flags)

    with launcher_lock(tmp_path) as lock:
        monkeypatch.setattr(os, "open", read_only)
        assert lock.held_by() == f"launcher, pid {os.getpid()}"
    assert launcher_lock(tmp_path).held_by() == ""


def test_the_newest_run_is_the_one_begun_or_resumed_last(run_dir: Path, unused_tcp_port: int) -> None:
    assert newest_run(Path("nowhere")) is None
    later = make_run(run_dir.parent / "a-later-one", unused_tcp_port)
    for directory, begun in ((run_dir, 1), (later, 2)):
        os.utime(directory / "recipe.json", (begun, begun))
    assert newest_run() == Path("runs") / later.name
    (run_dir / "pids.json").write_text("{}")
    assert newest_run() == Path("runs") / run_dir.name, "it was resumed after the other had begun"


@pytest.mark.parametrize(("state", "alone", "newest"), [("", False, 1), ("finished", False, 0), ("finished", True, 1)])
def test_a_finished_evaluation_is_the_newest_run_only_where_it_is_alone(
    run_dir: Path, unused_tcp_port: int, state: str, alone: bool, newest: int
) -> None:
    evaluation = make_run(run_dir.parent / "an-evaluation", unused_tcp_port, "run.steps=0", "run.until=null")
    os.utime(run_dir / "recipe.json", (1, 1))
    if state:
        end(evaluation, state)
    if alone:
        shutil.rmtree(run_dir)
    assert newest_run() == Path("runs") / (run_dir, evaluation)[newest].name


@pytest.mark.parametrize("state", ["", "finished"])
@pytest.mark.parametrize("command", ["status", "doctor", "fate", "weights", "checkpoints"])
def test_what_commands_say_about_a_run_fits_the_terminal(
    run_dir: Path, state: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_dir, 9)
    if state:
        end(run_dir, state)
    monkeypatch.setenv("COLUMNS", "60")
    done = rollmill(command, f"runs/{run_dir.name}")
    assert all(len(line) <= 60 for line in done.stdout.splitlines()), done.stdout


@pytest.mark.parametrize("state", ["", "finished", "stopped"])
def test_stop_of_a_run_without_processes_says_that_there_is_nothing_to_stop_and_pause_is_an_error(
    run_dir: Path, state: str
) -> None:
    train(run_dir, 4)
    (run_dir / "journal").mkdir()
    if state:
        end(run_dir, state)
    done = rollmill("stop")
    assert done.exit_code == 0 and "run: runs/quick (the newest)" in done.stderr, done.output
    assert f"nothing to stop: runs/quick: {state or 'interrupted'}" in done.stdout
    assert ("rollmill trajectories" in done.stdout) == bool(state)
    done = rollmill("pause")
    assert isinstance(done.exception, InfrastructureError)
    assert (f"the run is over ({state})" if state else "--resume runs/quick") in done.exception.message


@pytest.mark.parametrize(
    "command", [["trajectories"], ["fate"], ["checkpoints"], ["export"], ["weights"], ["plot"], ["trace"]]
)
def test_reading_commands_without_any_run_say_so(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = rollmill(*command)
    assert isinstance(done.exception, ConfigError) and "there is no run in ./runs" in done.exception.message


# --- what a directory holds


@pytest.mark.parametrize(
    "read", [check_run_directory, read_metrics, open_journal, lambda path: read_trajectories(path, Wanted())]
)
def test_every_command_says_the_same_of_a_directory_that_holds_no_run(
    read: Callable[[Path], object], run_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"runs is no run directory: recipe\.json is missing"):
        read(tmp_path / "runs")
    with pytest.raises(ConfigError, match=r"there is no directory .*quik; did you mean .*runs/quick\?"):
        read(tmp_path / "runs" / "quik")
    with pytest.raises(ConfigError, match=r"there is no directory .*zebra; the newest run there is .*runs/quick$"):
        read(tmp_path / "runs" / "zebra")


def test_nobody_answers_for_a_run_that_starts(run_dir: Path) -> None:
    assert "starting checkpoints come first" in why_silent(run_dir)


@pytest.mark.parametrize(
    ("state", "why"), [("finished", "all its training steps are done"), ("stopped", "rollmill stop")]
)
def test_a_run_that_is_over_is_not_started_again(run_dir: Path, state: str, why: str) -> None:
    assert run_directory.reopen(run_dir)[1] == run_dir
    end(run_dir, state)
    with pytest.raises(ConfigError, match=f"cannot continue: .*{why}.*begin another run"):
        run_directory.reopen(run_dir)


def test_resolve_writes_over_no_run(run_dir: Path) -> None:
    result = CliRunner().invoke(app, ["resolve", str(REPOSITORY / "recipes/quickstart"), str(run_dir)])
    assert isinstance(result.exception, ConfigError)
    assert "quick holds a run already: name another directory" in result.exception.message


def test_a_misspelt_run_is_no_checkpoint_on_the_hub(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir.parent.parent)
    recipe = load_recipe(REPOSITORY / "recipes/quickstart", [], {})
    with pytest.raises(ConfigError, match=r"there is no directory .*quik; did you mean runs/quick\?"):
        evaluation_recipe(recipe, ["runs/quik"])


# --- transfers of weights

DELTA = WeightTransfer(
    policy="model0", version=3, base_version=2, encoding="delta", transport="bulk",
    sources=("127.0.0.1:9", "127.0.0.1:8"), payload_size_bytes=1000, full_size_bytes=200_000, num_changes=1000,
    started_at=1000.5, encode_s=0.25, fetch_s=0.5, verify_s=0.125, write_s=0.0625, pause_s=0.03125,
)  # fmt: skip
FULL = WeightTransfer(
    policy="model0", version=2, encoding="full", transport="mapped", payload_size_bytes=200_000,
    full_size_bytes=200_000, num_changes=100_000, started_at=900.0, fetch_s=1.0, verify_s=0.5, write_s=0.0, pause_s=0.1,
)  # fmt: skip
FAILED = WeightTransfer(policy="model0", version=4, base_version=3, started_at=1100.0, error="the stream ended early")


def _run(directory: Path, transfers: list[tuple[str, WeightTransfer]]) -> Path:
    writer = MetricsWriter(directory / "metrics" / "orchestrator.jsonl")
    writer.write("training_step", policy="model0", step=1)
    for replica, transfer in transfers:
        writer.write("weight_transfer", replica=replica, **asdict(transfer))
    writer.close()
    return directory


def test_transfers_are_summed_up_by_policy_and_replica(tmp_path: Path) -> None:
    run = _run(tmp_path, [("a", DELTA), ("a", FULL), ("a", FAILED), ("b", FULL)])
    first, second = summarise(read_transfers(run))
    assert (first["replica"], first["num_full"], first["num_delta"], first["num_failed"]) == ("a", 1, 1, 1)
    assert first["bytes"] == 201_000 and first["saved_bytes"] == 199_000
    assert first["bits_per_change"] == pytest.approx(8.0)
    assert first["fetch_s"] == pytest.approx(0.75), "the median over what arrived"
    assert (second["replica"], second["num_delta"], second["bits_per_change"]) == ("b", 0, None)


def test_what_is_shown_names_mode_source_bits_stages_and_failures(tmp_path: Path) -> None:
    out, run = io.StringIO(), _run(tmp_path, [("a", DELTA), ("a", FAILED)])
    show(read_transfers(run), Console(file=out, width=220), last=5)
    wanted = ("delta bulk", "127.0.0.1:9", "2 → 3", "8.0", "250.0 ms", "31.2 ms", "the stream ended early")
    assert [words for words in wanted if words not in out.getvalue()] == []
    with pytest.raises(ConfigError, match="model0 at a"):
        read_transfers(run, policy="other")
