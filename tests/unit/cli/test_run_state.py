"""The state of a run from its directory: whether the directory is a run, whether the run is over, and why no process
answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.inspect.run_model import open_journal
from services.cli.inspect.run_state import check_run_directory, read_metrics, why_silent
from services.cli.inspect.trajectories import Wanted, read_trajectories
from services.cli.run import directory as run_directory
from services.cli.run.evaluate import evaluation_recipe
from services.cli.watch import reach
from services.common.config.loading import load_recipe, save_resolved
from services.common.errors import ConfigError, InfrastructureError

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def run_dir(tmp_path: Path, unused_tcp_port: int) -> Path:
    directory = tmp_path / "runs" / "quick"
    directory.mkdir(parents=True)
    overrides = [f"run.dir={tmp_path / 'runs'}", "run.id=quick", f"orchestrator.port={unused_tcp_port}"]
    save_resolved(load_recipe(REPOSITORY / "recipes/quickstart", overrides, {}), directory)
    return directory


def end(run_dir: Path, state: str) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"state": state}))


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


def test_nobody_answers_for_a_run_that_starts_stands_or_is_over(run_dir: Path) -> None:
    assert "starting checkpoints come first" in why_silent(run_dir)
    (run_dir / "journal").mkdir()
    assert f"rollmill run --resume {run_dir}" in why_silent(run_dir)
    end(run_dir, "stopped")
    assert "the run is over (stopped)" in why_silent(run_dir)


def test_a_command_in_a_folder_without_runs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.delenv("ROLLMILL_KEYS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("services.cli.watch.ORCHESTRATOR", f"127.0.0.1:{unused_tcp_port}")
    client = reach(None, None)
    try:
        with pytest.raises(InfrastructureError, match=rf"{tmp_path}/runs has no run, and this is the default address"):
            client.get_run()
    finally:
        client.close()


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
