"""A new run gets a directory of its own, and a refused one leaves no files."""

from __future__ import annotations

import errno
import io
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.inspect.run_state import processes_left
from services.cli.run import directory as run_directory
from services.cli.run import launch as run
from services.cli.run.directory import prepare, with_other_ports
from services.cli.watch import reach
from services.common.config.loading import load_recipe, load_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.system.machine import free_ports
from tests.waiting import WAIT_S

REPOSITORY = Path(__file__).resolve().parents[3]


def quickstart(runs: Path, *overrides: str) -> Recipe:
    return load_recipe(REPOSITORY / "recipes/quickstart", [f"run.dir={runs}", *overrides], {})


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
