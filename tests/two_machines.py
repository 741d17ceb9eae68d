"""Two machines on one: each with network, mounts, processes and a name of its own, joined by a virtual cable.

    node0 10.77.0.1 ---- cable ---- 10.77.0.2 node1

A machine is a set of Linux namespaces held by a process that is the first of its pid namespace, so a machine that is
switched off loses all its processes at once, as by kill -9, without closing connections. Each has its own loopback, its
own /dev/shm (so that no process takes both for one host) and its own directory, invisible to the other. Needs
root, `ip`, `unshare` and `nsenter`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = ("services", "extras", "recipes", "deploy")  # what a machine needs of the repository
START_S = 20.0
_NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc")


class Machine:
    """One of the two. ``popen`` runs a command there; ``directory`` is its own disk."""

    def __init__(self, name: str, address: str, directory: Path) -> None:
        self.name = name
        self.address = address
        self.directory = directory
        self.checkout = directory / "checkout"
        self._holder: subprocess.Popen[bytes] | None = None

    @property
    def init_pid(self) -> int:
        """The first process of the machine, as the host counts."""
        assert self._holder is not None, f"{self.name} is switched off"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        deadline = time.monotonic() + START_S
        while not (pids := children.read_text().split()):
            assert time.monotonic() < deadline and self._holder.poll() is None, f"{self.name} did not start"
            time.sleep(0.01)
        return int(pids[0])

    def switch_on(self, hosts: Path) -> None:
        command = [
            "setpriv",
            "--pdeathsig=KILL",
            "unshare",
            *_NAMESPACES,
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sleep",
            "infinity",
        ]
        self._holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + START_S
        while self._run("sh", "-c", "mountpoint -q /proc && grep -q sleep /proc/1/comm").returncode != 0:
            assert time.monotonic() < deadline, f"{self.name} did not start"
            time.sleep(0.02)
        self.do("hostname", self.name)
        self.do("mount", "-t", "tmpfs", "-o", "size=1g", "none", "/dev/shm")
        self.do("mount", "--bind", str(hosts), "/etc/hosts")
        self.do("ip", "link", "set", "lo", "up")

    def switch_off(self) -> None:
        """Everything that runs there is killed by the kernel."""
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait(START_S)
            self._holder = None

    def popen(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[str] | int | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command there, in the machine's checkout, its output and errors together."""
        # Of its own, because what lies in the host's is named by process ids, which here are others.
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        variables = {**os.environ, "PYTHONPATH": str(self.checkout), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
        variables |= environment or {}
        arguments = [*self._enter(), f"--wd={cwd or self.checkout}", *command]
        return subprocess.Popen(
            arguments, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True
        )

    def do(self, *command: str) -> str:
        """Run a command of the system there to its end; raises on failure."""
        done = self._run(*command)
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self._enter(), *command], capture_output=True, text=True, check=False, timeout=START_S)

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self.init_pid}", *_NAMESPACES]


class TwoMachines:
    """``node0`` and ``node1`` below a directory, and the cable between them."""

    def __init__(self, directory: Path) -> None:
        self.node0 = Machine("node0", "10.77.0.1", directory / "node0")
        self.node1 = Machine("node1", "10.77.0.2", directory / "node1")
        self._away = directory / "node0-by-ssh"  # node0's disk as node1's ssh reaches it
        self._hosts = directory / "hosts"
        self._ssh = directory / "bin" / "ssh"
        machines = (self.node0, self.node1)
        self._hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{m.address} {m.name}\n" for m in machines))
        for machine in machines:
            machine.directory.mkdir()
            for part in CHECKOUT:
                shutil.copytree(ROOT / part, machine.checkout / part)  # with what Python has compiled
        self._away.mkdir()
        self._write_ssh()

    @property
    def path(self) -> str:
        """PATH with the stand-in for ssh, and with the Python that runs this."""
        return os.pathsep.join([str(self._ssh.parent), str(Path(sys.executable).parent), os.environ["PATH"]])

    def switch_on(self) -> None:
        self.node0.switch_on(self._hosts)
        # Its address is not the cable's, which vanishes with node1: an interface stays when its peer is switched off.
        self.node0.do("ip", "link", "add", "name", "lan", "type", "bridge")
        self.node0.do("ip", "address", "add", f"{self.node0.address}/24", "dev", "lan")
        self.node0.do("ip", "link", "set", "lan", "up")
        self.switch_on_node1()

    def switch_on_node1(self) -> None:
        """Also after the machine was switched off; the cable is then a new one, with the same addresses."""
        self.node1.switch_on(self._hosts)
        self.node1.do("mount", "--bind", str(self.node0.directory), str(self._away))
        self.node1.do("mount", "-t", "tmpfs", "none", str(self.node0.directory))
        # In the network of node0 but with the process ids of the host, by which the other network is named.
        cable = ["name", "cable", "type", "veth", "peer", "name", "cable", "netns", str(self.node1.init_pid)]
        subprocess.run(
            ["nsenter", f"--target={self.node0.init_pid}", "--net", "ip", "link", "add", *cable],
            check=True,
            timeout=START_S,
        )
        self.node0.do("ip", "link", "set", "cable", "master", "lan", "up")
        self.node1.do("ip", "address", "add", f"{self.node1.address}/24", "dev", "cable")
        self.node1.do("ip", "link", "set", "cable", "up")

    def unplug(self) -> None:
        """The cable is out: no packet passes, and no connection is told."""
        self.node1.do("ip", "link", "set", "cable", "down")

    def plug_in(self) -> None:
        self.node1.do("ip", "link", "set", "cable", "up")

    def switch_off(self) -> None:
        for machine in (self.node1, self.node0):
            machine.switch_off()

    def _write_ssh(self) -> None:
        """``ssh node0 COMMAND`` on node1: runs the command here, where node0's disk lies under another name."""
        self._ssh.parent.mkdir()
        self._ssh.write_text(
            f'#!/bin/sh\n[ "$1" = node0 ] || exit 255\nshift\n'
            f'exec sh -c "$(printf %s "$*" | sed "s,{self.node0.directory}/,{self._away}/,g")"\n'
        )
        self._ssh.chmod(0o755)


def why_not() -> str | None:
    """Why no machines can be made here; None when they can."""
    if not sys.platform.startswith("linux"):
        return "namespaces are Linux's"
    if missing := [name for name in ("ip", "unshare", "nsenter", "setpriv", "mount") if shutil.which(name) is None]:
        return f"{', '.join(missing)} is not installed (packages iproute2, util-linux, mount)"
    probe = ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "ip", "link", "add", "name", "one", "type", "veth"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=START_S)
    return f"namespaces are not permitted here: {done.stderr.strip()}" if done.returncode else None


@contextmanager
def two_machines(directory: Path) -> Iterator[TwoMachines]:
    """Both switched on and joined; off again at the end, with all that runs there."""
    machines = TwoMachines(directory)
    try:
        machines.switch_on()
        yield machines
    finally:
        machines.switch_off()
