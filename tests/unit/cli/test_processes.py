"""The launcher starts, restarts and stops exactly its own processes. Real processes, real health services."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.console import StopSignal
from services.cli.plan import ProcessSpec
from services.cli.run.processes import ForkServer, Processes, reap_orphans
from services.common import run_files
from services.common.errors import DeadlineError, InfrastructureError
from services.common.rpc.client import is_serving
from services.common.system.child import LEFT, module_command
from services.common.system.processes import ChildProcess
from tests.running import is_running
from tests.waiting import WAIT_S, wait_until

SERVING = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(sys.argv[1])
server.start()
time.sleep(60)
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path, max_restarts=1, stop_grace_s=5.0)
    yield started
    started.stop()


def spec(name: str, code: str, address: str = "") -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, "-c", code, address), address=address)


def test_ready_means_that_health_says_serving(processes: Processes, unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    processes.start(spec("server", SERVING, address))
    processes.wait_ready(timeout_s=20)
    assert is_serving(address)


def test_nobody_is_waited_for_once_the_process_that_ends_the_run_has_left(
    processes: Processes, unused_tcp_port: int
) -> None:
    processes.start(spec("orchestrator", "", f"127.0.0.1:{unused_tcp_port}"))
    processes.start(spec("trainer", "import time; time.sleep(60)", f"127.0.0.1:{unused_tcp_port}"))
    processes.wait_ready(timeout_s=20, ends_with="orchestrator")


def test_a_process_that_never_gets_ready_is_named_with_its_last_words(
    processes: Processes, tmp_path: Path, unused_tcp_port: int
) -> None:
    code = "import sys, time; print('still loading', file=sys.stderr, flush=True); time.sleep(60)"
    processes.start(spec("slow", code, f"127.0.0.1:{unused_tcp_port}"))
    log = run_files.logs(tmp_path) / "slow.stderr"
    wait_until(lambda: "still loading" in log.read_text(), "its words")
    with pytest.raises(DeadlineError, match=r"slow not ready after 1(.|\n)*still loading"):
        processes.wait_ready(timeout_s=1.0)


def test_an_error_exit_ends_the_run_with_the_last_words(processes: Processes) -> None:
    processes.start(spec("broken", "raise SystemExit('the disk is full')"))
    with pytest.raises(InfrastructureError, match=r"broken exited with 1(.|\n)*the disk is full"):
        wait_until(processes.watch, "the exit")


def test_a_killed_process_is_started_again_a_bounded_number_of_times(processes: Processes) -> None:
    processes.start(spec("worker", "import time; time.sleep(60)"))
    first = processes.pids()["worker"]
    os.kill(first, signal.SIGKILL)

    def restarted() -> bool:
        processes.watch()
        return processes.pids()["worker"] != first

    wait_until(restarted, "the restart")
    os.kill(processes.pids()["worker"], signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="worker was killed by SIGKILL"):
        wait_until(processes.watch, "the second death")


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
def test_what_a_killed_process_has_left_ends_at_its_restart_or_at_the_end_of_the_run(
    processes: Processes, tmp_path: Path, trap: str
) -> None:
    left = tmp_path / "left"
    child = f"({trap}exec sh -c 'echo $$ > {left}; exec sleep 300') &"
    starts = f"[ -s {left} ] || {{ {child} while [ ! -s {left} ]; do sleep 0.01; done; kill -9 $$; }}; exec sleep 60"
    processes.start(ProcessSpec(name="worker", argv=("/bin/sh", "-c", starts), address=""))
    first = processes.pids()["worker"]
    wait_until(lambda: processes.watch() is not None and processes.pids()["worker"] != first, "the restart")
    pid = int(left.read_text())
    if trap:
        assert is_running(pid)
        processes.stop()
    wait_until(lambda: not is_running(pid), "the end of its child")


def test_stop_kills_no_later_process_with_the_number_of_one_that_has_left(processes: Processes) -> None:
    processes.start(spec("brief", "pass"))
    wait_until(lambda: processes.watch() == {"brief"}, "its leaving")
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        processes._running["brief"].popen.pid = other.pid  # type: ignore[misc]  # as the kernel gives a number again
        processes.stop()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.1)
        other.kill()


def test_a_second_signal_kills_all_groups_at_once_and_names_them(tmp_path: Path) -> None:
    stop = StopSignal()
    try:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        asked_again = stop.again()
        assert not asked_again()
        processes = Processes(tmp_path, max_restarts=0, stop_grace_s=600.0)
        child = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
        busy = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {child}; print('up', flush=True); time.sleep(600)"
        processes.start(spec("busy", busy))
        processes.start(spec("quick", "import time; time.sleep(600)"))
        log = tmp_path / "logs" / "busy.stderr"
        wait_until(lambda: log.exists() and "up" in log.read_text(), "the process and its child")
        pids, grandchild = processes.pids(), int(log.read_text().split()[0])
        polls = 0

        def at_once() -> bool:
            nonlocal polls
            polls += 1
            if polls == 20:
                os.kill(os.getpid(), signal.SIGINT)  # raises nothing by now
            return asked_again()

        assert processes.stop(at_once) == {"busy": pids["busy"]}, "the other one ended by itself"
        wait_until(lambda: not any(map(is_running, [*pids.values(), grandchild])), "the end of all")
    finally:
        stop.restore()


def test_children_leave_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    child = (
        "from services.common.system.child import die_with_parent_if_asked; die_with_parent_if_asked()\n"
        f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    launcher = (
        "import sys, time, pathlib\n"
        "from services.cli.plan import ProcessSpec\n"
        "from services.cli.run.processes import Processes\n"
        f"p = Processes(pathlib.Path({str(tmp_path)!r}), 0, 1.0)\n"
        f"p.start(ProcessSpec(name='child', argv=(sys.executable, '-c', {child!r}), address=''))\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher])
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the child")
    process.kill()
    process.wait(timeout=WAIT_S)
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())), "the end of the child")


def test_a_process_that_asks_to_be_started_again_is_and_no_more_often_than_allowed(
    processes: Processes, tmp_path: Path
) -> None:
    """A trainer that lost the ranks of another node, and is healthy itself."""
    counting = "import pathlib; p = pathlib.Path({!r}); p.write_text(p.read_text() + '.' if p.exists() else '.')\n"
    again = f"{counting}import sys; sys.exit(75 if len(p.read_text()) < {{}} else 0)"
    processes.start(spec("heals", again.format(str(tmp_path / "heals"), 2)))
    wait_until(lambda: "heals" in processes.watch(), "the second, ordinary end")
    assert (tmp_path / "heals").read_text() == ".."

    processes.start(spec("does-not", again.format(str(tmp_path / "does-not"), 9)))
    with pytest.raises(InfrastructureError, match="does-not exited with 75"):
        wait_until(lambda: "does-not" in processes.watch(), "never")
    assert (tmp_path / "does-not").read_text() == ".."


def killed_often(processes: Processes, times: int) -> None:
    processes.start(spec("worker", "import time; time.sleep(60)"))
    for _ in range(times):
        before = processes.pids()["worker"]
        os.kill(before, signal.SIGKILL)

        def is_another(before: int = before) -> bool:
            processes.watch()
            return processes.pids()["worker"] != before

        wait_until(is_another, "the restart")


def test_deaths_far_apart_are_no_reason_to_end_a_long_run(tmp_path: Path) -> None:
    processes = Processes(tmp_path, max_restarts=1, stop_grace_s=5.0, well_after_s=0.0)
    try:
        killed_often(processes, times=4)
    finally:
        processes.stop()


def test_a_restart_for_which_there_is_no_memory_is_tried_again(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [errno.EAGAIN, errno.ENOMEM]
    start = processes._popen

    def popen(wanted: ProcessSpec) -> subprocess.Popen[bytes]:
        if processes.pids() and refusals:
            raise OSError(refusals.pop(), "for now")
        return start(wanted)

    monkeypatch.setattr(processes, "_popen", popen)
    killed_often(processes, times=1)
    assert not refusals


def test_what_left_without_being_asked_by_the_run_is_brought_back_a_bounded_number_of_times(
    processes: Processes,
) -> None:
    processes.start(spec("gateway", "pass"))
    wait_until(lambda: "gateway" in processes.watch(), "its leaving")
    first = processes.pids()["gateway"]
    processes.bring_back(["gateway"])
    assert processes.pids()["gateway"] != first
    wait_until(lambda: "gateway" in processes.watch(), "its leaving again")
    with pytest.raises(InfrastructureError, match="gateway exited with 0"):
        processes.bring_back(["gateway"])


def test_a_replica_that_users_code_ended_with_0_has_not_left_and_ends_the_run(processes: Processes) -> None:
    processes.start(
        spec("inference-a", "import os, sys; print('in the reward', file=sys.stderr, flush=True); os._exit(0)")
    )
    with pytest.raises(
        InfrastructureError, match=r"inference-a exited with 0 and was neither drained(.|\n)*in the reward"
    ):
        wait_until(lambda: "inference-a" in processes.watch(), "its leaving")
    processes.start(spec("inference-a", f"raise SystemExit({LEFT})"))
    wait_until(lambda: "inference-a" in processes.watch(), "its leaving in order")


# --- forked processes

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
def fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "forked_module.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("HOME_OF_THE_SERVER", "here")
    made = ForkServer(tmp_path / "fork_server.stderr", ["json"])
    yield made
    made.stop()


def fork(fork_server: ForkServer, output: Path, *arguments: str) -> ChildProcess:
    environment = {
        "COLOUR": "green",
        "PYTHONPATH": os.environ["PYTHONPATH"],
        "ROLLMILL_DIE_WITH_PARENT": str(os.getpid()),
    }
    found = fork_server.start(module_command("forked_module", *arguments), environment, output)
    assert found is not None
    return found


def test_it_runs_a_module_with_its_own_arguments_environment_and_output(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    output = tmp_path / "told"
    assert fork(fork_server, output, "tell", "a b").wait(WAIT_S) == 0
    assert output.read_text() == f"a b green None True {os.getpid()}\n"


def test_exit_codes_and_signals_reach_who_asked_for_it(fork_server: ForkServer, tmp_path: Path) -> None:
    assert fork(fork_server, tmp_path / "out", "leave", "75").wait(WAIT_S) == 75
    waiting = fork(fork_server, tmp_path / "up", "wait")
    wait_until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text())
    assert waiting.poll() is None
    os.kill(waiting.pid, signal.SIGKILL)
    assert waiting.wait(WAIT_S) == -signal.SIGKILL
    waiting.terminate()  # of one that has ended: nothing
    crashed = fork(fork_server, tmp_path / "crashed", "leave", "no number")
    assert crashed.wait(WAIT_S) == 1
    assert "ValueError" in (tmp_path / "crashed").read_text()


def test_the_end_of_the_server_ends_no_process_and_another_is_started_without_it(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    waiting = fork(fork_server, tmp_path / "up", "wait")
    wait_until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text())
    os.kill(fork_server.pid, signal.SIGKILL)
    wait_until(lambda: fork_server.start(module_command("forked_module", "wait"), {}, tmp_path / "none") is None)
    assert waiting.poll() is None
    waiting.terminate()
    assert waiting.wait(WAIT_S) == -signal.SIGTERM


def test_a_forked_process_ends_with_who_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "forked_module.py").write_text(MODULE)
    script = (
        "import os, sys; from pathlib import Path; from services.cli.run.processes import ForkServer\n"
        "from services.common.system.child import module_command\n"
        "place = Path(sys.argv[1]); fork_server = ForkServer(place / 'fork_server', ['json'])\n"
        "environment = {**os.environ, 'ROLLMILL_DIE_WITH_PARENT': str(os.getpid()), 'COLOUR': ''}\n"
        "made = fork_server.start(module_command('forked_module', 'wait'), environment, place / 'up')\n"
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


def test_orphans_of_what_has_ended_are_cleared_away_and_known_children_left(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    known = subprocess.Popen([sys.executable, "-c", ""])
    assert fork(fork_server, tmp_path / "out", "orphan").wait(WAIT_S) == 0

    def zombies() -> set[int]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return {int(c) for c in children if Path(f"/proc/{c}/stat").read_text().rpartition(")")[2].split()[0] == "Z"}

    wait_until(lambda: zombies() >= {known.pid})
    assert known.wait(WAIT_S) == 0  # one of ours is told first
    wait_until(lambda: reap_orphans({fork_server.pid}) is None and not zombies())


def test_a_server_that_is_given_up_starts_nothing_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forked_module.py").write_text(MODULE)
    (tmp_path / "slow.py").write_text(
        "import os, time\nwrite = os.write\n"
        "def late(fd, data):\n    time.sleep(1.5 if b'pid' in data else 0)\n    return write(fd, data)\n"
        "os.write = late\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}{os.pathsep}{tmp_path}")
    monkeypatch.setattr("services.cli.run.processes.ANSWER_S", 0.5)
    fork_server = ForkServer(tmp_path / "fork_server.stderr", ["slow"])
    argv = module_command("forked_module", "wait")
    assert fork_server.start(argv, dict(os.environ), tmp_path / "up") is None
    time.sleep(2.0)
    assert not (tmp_path / "up").exists()
