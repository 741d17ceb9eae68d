"""Processes that are forked from one with its imports done: real processes that differ from others only in their start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.plan import plan
from services.cli.run.processes import ForkServer, reap_orphans
from services.common.config.loading import validate
from services.common.system.child import module_command
from services.common.system.processes import ChildProcess
from tests.running import is_running
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.needs("Linux")  # orphans are adopted there only

MODULE = """
import os, signal, sys, time
from services.common.system.child import die_with_parent_if_asked
die_with_parent_if_asked()
what = sys.argv[1]
if what == "tell":
    print(sys.argv[2], os.environ["COLOUR"], os.environ.get("HOME_OF_THE_SERVER"), "json" in sys.modules, os.getppid())
elif what == "leave":
    sys.exit(int(sys.argv[2]))
elif what == "last words":
    import atexit, threading
    atexit.register(print, "at its end")
    threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread"))).start()
    sys.exit("error: it says why")
elif what == "orphan":
    if os.fork() == 0:
        time.sleep(0.2)
        os._exit(3)
elif what == "wait":
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "forked_module.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("HOME_OF_THE_SERVER", "here")
    made = ForkServer(tmp_path / "server.stderr", ["json"])
    yield made
    made.stop()


def start(server: ForkServer, output: Path, *arguments: str) -> ChildProcess:
    environment = {
        "COLOUR": "green",
        "PYTHONPATH": os.environ["PYTHONPATH"],
        "ROLLMILL_DIE_WITH_PARENT": str(os.getpid()),
    }
    found = server.start(module_command("forked_module", *arguments), environment, output)
    assert found is not None
    return found


def test_it_runs_a_module_with_its_own_arguments_environment_and_output(server: ForkServer, tmp_path: Path) -> None:
    output = tmp_path / "told"
    assert start(server, output, "tell", "a b").wait(WAIT_S) == 0
    assert output.read_text() == f"a b green None True {os.getpid()}\n"


def test_exit_codes_and_signals_reach_who_asked_for_it(server: ForkServer, tmp_path: Path) -> None:
    assert start(server, tmp_path / "out", "leave", "75").wait(WAIT_S) == 75
    waiting = start(server, tmp_path / "up", "wait")
    wait_until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text())
    assert waiting.poll() is None
    os.kill(waiting.pid, signal.SIGKILL)
    assert waiting.wait(WAIT_S) == -signal.SIGKILL
    waiting.terminate()  # of one that has ended: nothing
    crashed = start(server, tmp_path / "crashed", "leave", "no number")
    assert crashed.wait(WAIT_S) == 1
    assert "ValueError" in (tmp_path / "crashed").read_text()


def test_the_end_of_the_server_ends_no_process_and_another_is_started_without_it(
    server: ForkServer, tmp_path: Path
) -> None:
    waiting = start(server, tmp_path / "up", "wait")
    wait_until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text())
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: server.start(module_command("forked_module", "wait"), {}, tmp_path / "none") is None)
    assert waiting.poll() is None
    waiting.terminate()
    assert waiting.wait(WAIT_S) == -signal.SIGTERM


def test_a_forked_process_ends_with_who_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "forked_module.py").write_text(MODULE)
    script = (
        "import os, sys; from pathlib import Path; from services.cli.run.processes import ForkServer\n"
        "from services.common.system.child import module_command\n"
        "place = Path(sys.argv[1]); server = ForkServer(place / 'server', ['json'])\n"
        "environment = {**os.environ, 'ROLLMILL_DIE_WITH_PARENT': str(os.getpid()), 'COLOUR': ''}\n"
        "made = server.start(module_command('forked_module', 'wait'), environment, place / 'up')\n"
        "(place / 'pid').write_text(str(made.pid))\n"
        "import time; time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{tmp_path}"}
    launcher = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment)
    wait_until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text() and (tmp_path / "pid").exists())
    pid = int((tmp_path / "pid").read_text())
    launcher.kill()
    launcher.wait(WAIT_S)

    wait_until(lambda: not is_running(pid))


def test_orphans_of_what_has_ended_are_cleared_away_and_known_children_left(server: ForkServer, tmp_path: Path) -> None:
    known = subprocess.Popen([sys.executable, "-c", ""])
    assert start(server, tmp_path / "out", "orphan").wait(WAIT_S) == 0

    def zombies() -> set[int]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return {int(c) for c in children if Path(f"/proc/{c}/stat").read_text().rpartition(")")[2].split()[0] == "Z"}

    wait_until(lambda: zombies() >= {known.pid})
    assert known.wait(WAIT_S) == 0  # one of ours is told first
    wait_until(lambda: reap_orphans({server.pid}) is None and not zombies())


def test_a_server_that_is_given_up_starts_nothing_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forked_module.py").write_text(MODULE)
    (tmp_path / "slow.py").write_text(
        "import os, time\nwrite = os.write\n"
        "def late(fd, data):\n    time.sleep(1.5 if b'pid' in data else 0)\n    return write(fd, data)\n"
        "os.write = late\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}{os.pathsep}{tmp_path}")
    monkeypatch.setattr("services.cli.run.processes.ANSWER_S", 0.5)
    server = ForkServer(tmp_path / "server.stderr", ["slow"])
    argv = module_command("forked_module", "wait")
    assert server.start(argv, dict(os.environ), tmp_path / "up") is None
    time.sleep(2.0)
    assert not (tmp_path / "up").exists()


@pytest.mark.parametrize(
    ("section", "process", "forked"),
    [
        ({"engine": "torch", "device": "cpu"}, "inference-a", True),
        ({"engine": "scripted"}, "inference-a", False),
        ({"engine": "torch", "device": "auto"}, "inference-a", False),
        ({"engine": "sglang", "gpus": [0]}, "inference-a", False),
        ({}, "orchestrator", False),
    ],
)
def test_only_what_finds_its_imports_in_the_server_is_forked(
    section: dict[str, object], process: str, forked: bool, tmp_path: Path
) -> None:
    tree = {
        "name": "forked",
        "policies": {"model0": {"model": {"path": "some/model"}}},
        "inference": {"a": {"engine": "scripted", **section}},
        "data": {"train": {"path": "tasks.jsonl"}},
        "evaluation": {"at_start": False, "at_end": False},
    }
    specs = {spec.name: spec for spec in plan(validate(tree, source="test"), tmp_path)}
    assert specs[process].forked is forked
    assert not specs["trainer-model0"].forked, "its device is left to the machine: it may be a GPU"
