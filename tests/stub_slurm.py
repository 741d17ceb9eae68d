"""A scheduler with Slurm's commands on one machine: ``sbatch``, ``srun``, ``scontrol`` and ``scancel``, which really start,
requeue and end processes. All nodes of a job are this machine.

Only options that Slurm has, and that jobs of Rollmill use, are taken; another one is refused, as Slurm refuses a wrong
one. ``StubSlurm`` writes the commands into a directory for PATH; run as a script, this file is one of them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

COMMANDS = ("sbatch", "srun", "scontrol", "scancel")
STATE = "STUB_SLURM"
GRACE_S = 20.0  # between SIGTERM and SIGKILL
EVERY_S = 0.05
REQUEUE, FAILED, CANCELLED, EXIT = "requeue", "node_failed", "cancelled", "exit_code"

_SBATCH = {"job-name", "nodes", "ntasks", "ntasks-per-node", "signal", "cpus-per-task", "mem", "gpus-per-node", "requeue", "open-mode", "output", "array", "export", "time"}  # fmt: skip
_SRUN = {"kill-on-bad-exit"}


class StubSlurm:
    """The scheduler of a test; ``address``: the name that each node of its jobs has."""

    def __init__(self, directory: Path, address: str) -> None:
        self.directory = directory
        self.bin = directory / "bin"
        self.bin.mkdir(parents=True)
        self._address = address
        for name in COMMANDS:
            program = self.bin / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} {name} "$@"\n')
            program.chmod(0o755)

    def environment(self, **variables: str) -> dict[str, str]:
        path = f"{self.bin}:{os.environ['PATH']}"
        return {
            **os.environ,
            "PATH": path,
            STATE: str(self.directory),
            "STUB_SLURM_ADDRESS": self._address,
            **variables,
        }

    def call(self, *command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment(**variables)
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    def submit(self, *arguments: str, cwd: Path, **variables: str) -> str:
        """The number of the new job."""
        done = self.call("sbatch", *arguments, cwd=cwd, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def fail_node(self, job: str, node: int) -> None:
        """Switch a node off: its processes are gone at once, and Slurm requeues the job."""
        job_dir = self.directory / "jobs" / job
        pid = int((job_dir / f"node{node}.pid").read_text())
        (job_dir / FAILED).touch()
        _end([pid], signal.SIGKILL)

    def restarts(self, job: str) -> int:
        return int((self.directory / "jobs" / job / "restarts").read_text())

    def exit_code(self, job: str) -> int | None:
        """None while the job runs."""
        file = self.directory / "jobs" / job / EXIT
        return int(file.read_text()) if file.exists() else None

    def end(self) -> None:
        for file in (self.directory / "jobs").glob("*/runner.pid"):
            _end([int(file.read_text())], signal.SIGKILL)


def _options(words: Sequence[str], known: set[str]) -> tuple[dict[str, str], list[str]]:
    """``--name=value`` and ``--name`` options up to the first other word."""
    found = {}
    for place, word in enumerate(words):
        match = re.fullmatch(r"--([a-z-]+)(?:=(.*))?", word)
        if match is None:
            return found, list(words[place:])
        if match[1] not in known:
            sys.exit(f"unrecognized option '--{match[1]}'")
        found[match[1]] = match[2] or ""
    return found, []


def _sbatch(words: Sequence[str]) -> None:
    given, (script, *arguments) = _options(words, _SBATCH)
    text = Path(script).read_text()
    lines = re.findall(r"^#SBATCH (.*)$", text, flags=re.MULTILINE)
    options = {**_options(lines, _SBATCH)[0], **given}
    jobs = Path(os.environ[STATE]) / "jobs"
    jobs.mkdir(exist_ok=True)
    number = 1 + len(list(jobs.iterdir()))
    exported = dict(pair.split("=", 1) for pair in options.get("export", "ALL").split(",") if "=" in pair)
    first, _, last = options.get("array", "").partition("-")
    for task in range(int(first), int(last or first) + 1) if first else [None]:
        name = str(number) if task is None else f"{number}_{task}"
        job = jobs / name
        job.mkdir()
        (job / "slurm_script").write_text(text)  # Slurm runs a copy
        (job / "restarts").write_text("0")
        environment = {**os.environ, **exported, "SLURM_JOB_ID": str(number if task is None else number + task)}
        environment |= {"SLURM_NNODES": options.get("nodes", "1"), "STUB_SLURM_JOB": str(job)}
        environment |= {"SLURM_CPUS_PER_TASK": options.get("cpus-per-task", "1")}
        environment["SLURM_JOB_NODELIST"] = ",".join(
            [os.environ["STUB_SLURM_ADDRESS"]] * int(environment["SLURM_NNODES"])
        )
        if task is not None:
            environment |= {"SLURM_ARRAY_JOB_ID": str(number), "SLURM_ARRAY_TASK_ID": str(task)}
        (job / "job.json").write_text(json.dumps({"environment": environment, "arguments": arguments}))
        with (job / "output").open("ab") as output:
            runner = [sys.executable, __file__, "run", str(job)]
            child = subprocess.Popen(
                runner, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        (job / "runner.pid").write_text(str(child.pid))
    sys.stdout.write(f"Submitted batch job {number}\n")


def _run(job: Path) -> None:
    """Runs the script of a job, again after a requeue, in the order of Slurm: end all, then begin anew."""
    about = json.loads((job / "job.json").read_text())
    while True:
        restarts = int((job / "restarts").read_text())
        environment = {**about["environment"], **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})}
        batch = subprocess.Popen(
            ["bash", str(job / "slurm_script"), *about["arguments"]], env=environment, start_new_session=True
        )
        (job / "batch.pid").write_text(str(batch.pid))
        while batch.poll() is None and not any((job / why).exists() for why in (REQUEUE, FAILED, CANCELLED)):
            time.sleep(EVERY_S)
        _end([batch.pid], signal.SIGTERM)
        code = batch.wait()
        again = [why for why in (REQUEUE, FAILED) if (job / why).exists()]
        if not again or (job / CANCELLED).exists():
            (job / "partial").write_text(str(code))
            (job / "partial").rename(job / EXIT)
            return
        for why in again:
            (job / why).unlink()
        (job / "restarts").write_text(str(restarts + 1))


def _srun(words: Sequence[str]) -> int:
    options, command = _options(words, _SRUN)
    job = Path(os.environ["STUB_SLURM_JOB"])
    tasks = []
    for node in range(int(os.environ["SLURM_NNODES"])):
        environment = {**os.environ, "SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}
        tasks.append(subprocess.Popen(command, env=environment, start_new_session=True))
        (job / f"node{node}.pid").write_text(str(tasks[-1].pid))
    signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
    while any(task.poll() is None for task in tasks):
        time.sleep(EVERY_S)
        if options.get("kill-on-bad-exit") == "1" and any(task.returncode for task in tasks):
            _end([task.pid for task in tasks if task.poll() is None], signal.SIGTERM)
    return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks)


def _scontrol(words: Sequence[str]) -> None:
    if list(words[:2]) == ["show", "hostnames"]:
        sys.stdout.write(words[2].replace(",", "\n") + "\n")
    elif words[0] == "requeue":
        (Path(os.environ[STATE]) / "jobs" / words[1] / REQUEUE).touch()
    else:
        sys.exit(f"invalid keyword: {' '.join(words)}")


def _scancel(words: Sequence[str]) -> None:
    (Path(os.environ[STATE]) / "jobs" / words[0] / CANCELLED).touch()


def _end(pids: Sequence[int], how: signal.Signals) -> None:
    """Signal processes and all that they started, and kill after ``GRACE_S`` those that are left."""
    everything = _descendants(pids)
    deadline = time.monotonic() + GRACE_S
    _signal(everything, how)
    while how is not signal.SIGKILL and (left := [pid for pid in everything if _lives(pid)]):
        if time.monotonic() > deadline:
            _signal(left, signal.SIGKILL)
            return
        time.sleep(EVERY_S)


def _descendants(pids: Sequence[int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = list(pids)
    for pid in found:
        found += children.get(pid, [])
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _signal(pids: Sequence[int], how: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, how)
        except ProcessLookupError:
            pass  # it has ended


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "run":
        _run(Path(rest[0]))
    elif command == "srun":
        sys.exit(_srun(rest))
    else:
        {"sbatch": _sbatch, "scontrol": _scontrol, "scancel": _scancel}[command](rest)
