"""The supervisor: enforces every limit, decides every verdict, and empties every slot.

One thread, one epoll loop, started before the gateway has any thread. The process is the child subreaper, so an orphan
of a program becomes its child (at tier 2 the child of the slot's first process) and is found. The supervisor answers
one gateway and ends, with all runs, when that gateway ends.

Invariant: an answer is sent only when the run's slot has no process and an empty work dir.
"""

from __future__ import annotations

import _socket
import ctypes
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from .. import messages, procfs, wire
from ..confine import memcg
from ..forkserver.fork_servers import ForkServer, ForkServers
from ..messages import Start
from ..statuses import STOOD_STILL_S, RunStatus
from .gateway_end import GatewayEnd
from .interactive_channel import InteractiveChannel
from .orphans import Orphans
from .run import Limits, Run
from .sealed import sealed
from .slots import Slot

_PR_SET_CHILD_SUBREAPER = 36
_WITHOUT_ANSWER = ("program", "judged", "echo")  # modes whose only outputs are stdout and stderr
_CLEANING_LOOK_S = 0.002
_KILL_TAKES_S = 0.05  # before a run that was stopped is looked at again


class Supervisor:
    """Runs programs for the probe (``run_alone``) and then for the gateway (``serve``)."""

    def __init__(
        self,
        gateway: socket.socket,
        tier: str,
        slots: Sequence[Slot],
        num_programs: int,
        fork_settings: dict[str, Any],
        memory: memcg.MemoryGroups | None = None,
    ) -> None:
        """``slots``: ``num_programs`` for programs, the rest for live processes; ``memory``: a cgroup for each slot, where
        the machine grants them. The gateway counts free slots, too, and never asks for more than there are."""
        self._tier = tier
        self._slots = slots
        self._free = [*slots[:num_programs]]
        self._free_live = [*slots[num_programs:]]
        if memory is not None:
            for slot in self._slots:
                slot.memory = memory.slots[slot.index]
        self._runs: dict[int, Run] = {}
        self._cleaning: dict[int, Run] = {}
        self._channels: dict[int, InteractiveChannel] = {}
        self._epoll = select.epoll()
        self._gateway = GatewayEnd(self._epoll, gateway)
        self._forks = ForkServers(
            self._epoll, {**fork_settings, "tier": tier, "slot_dirs": [slot.directory for slot in self._slots],
                          "accounted": memory is not None},
        )  # fmt: skip
        self._orphans = Orphans(tier, self._forks, {memory.mover_pid} if memory is not None else set())
        self._forks.start("plain")

    def start_profiles(self, profiles: list[str]) -> None:
        """Start their fork servers now rather than at the first run that asks for them."""
        for profile in profiles:
            self._forks.start(profile)

    def _fork_server_died(self, server: ForkServer) -> None:
        """A fork server died, and its children with the server; the machine is at fault for their runs.

        A child that was about to ask for the parent-death signal cannot see, from its own pid namespace, that its parent
        is dead: the end of the namespace kills it.
        """
        for run_id in self._forks.died(server):
            if run_id in self._runs:
                run = self._runs[run_id]
                if run.stop_status is None:
                    run.stop_status, run.detail = RunStatus.INFRA_ERROR, "the fork server died"
                run.slot.kill_namespace()
                self._begin_cleaning(run, time.monotonic())
        self._forks.get(server.profile)

    # -- loop ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the gateway closes its end."""
        while self._turn():
            pass
        for slot in self._slots:
            slot.sweep()
            slot.close()

    def run_alone(self, source: bytes, limits: Limits) -> tuple[dict[str, Any], list[bytes]]:
        """One run without a gateway: the start-up probe."""
        self._start({"id": 0, "mode": "program", "profile": "plain"}, limits, source, b"", b"")
        while not self._gateway.unsent:
            if not self._turn():
                raise SystemExit("the gateway has gone")
        frame = next(wire.FrameReader().feed(bytes(self._gateway.unsent)))
        self._gateway.unsent.clear()
        return frame

    def close(self) -> None:
        self._forks.close()
        for slot in self._slots:
            slot.close()

    def _turn(self) -> bool:
        now = time.monotonic()
        wait = -1.0
        if self._cleaning:
            wait = _CLEANING_LOOK_S
        elif self._runs:
            wait = max(0.0, min(run.next_look for run in self._runs.values()) - now)
        events = self._epoll.poll(wait)
        stood_still_s = time.monotonic() - now - wait if wait >= 0 else 0.0
        if stood_still_s > STOOD_STILL_S:
            for run in self._runs.values():
                run.stood_still(stood_still_s)
        for fd, event in events:
            server = self._forks.of_fd(fd)
            if server is not None:
                self._receive_from(server)
            elif fd == self._gateway.fd:
                if event & select.EPOLLOUT:
                    self._gateway.flush()
                if event & ~select.EPOLLOUT and not self._receive_requests():
                    return False
            else:
                self._serve_channel(fd)
        now = time.monotonic()
        due = [run for run in self._runs.values() if run.next_look <= now]
        if due:
            orphans = self._orphans.found()
            for run in due:
                self._check_limits(run, now, orphans)
        for run in list(self._cleaning.values()):
            self._clean(run, now)
        return True

    def _check_limits(self, run: Run, now: float, orphans: list[int]) -> None:
        run.strays_cpu_s = max(run.strays_cpu_s, run.slot.adopted_cpu_s() - run.adopted_before_s)
        status = run.check_limits(now, run.slot.strays(orphans))
        if run.id in self._channels:
            self._send_output(self._channels[run.id])
        if status is not None:
            self._stop(run, status)
        elif run.turn is not None and run.pid is not None and run.turn.check(now, run.is_flooded):
            run.fork_server.send(messages.order(messages.INTERRUPT, run.id))

    def _stop(self, run: Run, status: RunStatus) -> None:
        if run.stop_status is None:
            run.stop_status = status
        # sent to the fork server, which alone knows that the kernel has not reused the pid
        run.fork_server.send(messages.order(messages.KILL, run.id))
        run.next_look = time.monotonic() + _KILL_TAKES_S

    # -- the gateway's side -------------------------------------------------------------------------------------

    def _receive_requests(self) -> bool:
        """Handle requests. Returns False when the gateway has gone."""
        requests = self._gateway.receive()
        if requests is None:
            return False
        for head, blobs in requests:
            if head["kind"] == "run":
                self._start(head, Limits(**head["limits"]), *blobs)
            elif head["kind"] == "say":
                self._write_to(head["id"], blobs[0])
            elif head["kind"] == "cancel":
                self._cancel(head["id"])
        return True

    def _cancel(self, run_id: int) -> None:
        if run_id in self._runs:
            self._stop(self._runs[run_id], RunStatus.CANCELLED)

    def _serve_channel(self, fd: int) -> None:
        for channel in list(self._channels.values()):
            if fd == channel.ask_fd:
                channel.flush()
            elif fd == channel.answer_fd:
                self._send_output(channel)

    def _write_to(self, run_id: int, data: bytes) -> None:
        if run_id in self._channels:
            channel = self._channels[run_id]
            channel.run.ask(time.monotonic())
            channel.write(data)

    def _send_output(self, channel: InteractiveChannel, last: bool = False) -> None:
        run = channel.run
        channel.read()
        held_back = run.turn is not None and run.turn.awaits_signal and not last
        if not channel.received or held_back:
            return
        if not last:
            whole = channel.is_whole_frame(run.limits.answer_bytes)
            if whole is False or run.turn is None:
                run.detail = "the code wrote to the process's own channel"
                self._stop(run, RunStatus.RUNTIME_ERROR)
                return
            if whole is None:  # the turn, and with the turn the time limit, continues
                return
        said = channel.take()
        told, output = run.end_turn()
        self._gateway.send({"kind": "said", "id": run.id, **told}, [said, *output])

    # -- runs ---------------------------------------------------------------------------------------------------

    def _start(self, head: dict[str, Any], limits: Limits, source: bytes, stdin: bytes, payload: bytes) -> None:
        slot = (self._free_live if limits.turn_s else self._free).pop()
        source_fd = sealed(source)
        stdin_fd = sealed(stdin) if stdin else _empty_input()
        answers = head["mode"] not in _WITHOUT_ANSWER
        pipes = [os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC), _no_pipe()]
        if answers:
            pipes.append(os.pipe2(os.O_CLOEXEC))
        for read_end, _ in pipes:
            os.set_blocking(read_end, False)
        (out, write_out), (err, write_err), (note, write_note) = pipes[:3]
        answer, write_answer = pipes[3] if answers else (None, source_fd)  # its place is not empty; the child closes it
        run = Run(head["id"], slot, limits, (out, err, note, answer), time.monotonic())
        run.fork_server = self._forks.get(head["profile"])
        run.adopted_before_s = slot.adopted_cpu_s()
        self._runs[run.id] = run
        if run.is_live:
            ask_fd, say_fd = os.pipe2(os.O_CLOEXEC)
            self._channels[run.id] = InteractiveChannel(self._epoll, run, say_fd)
        elif answers:
            ask_fd = sealed(payload) if payload else _empty_input()
        else:
            ask_fd = source_fd
        message = messages.START_STRUCT.pack(
            *Start(messages.START, run.id, messages.MODES[head["mode"]], slot.index, slot.uid, limits.cpu_s,
                   limits.memory_bytes, limits.processes + self._orphans.num_others_of_user(), limits.file_bytes,
                   limits.open_files, limits.disk_bytes, limits.num_files, slot.mark, len(source))
        )  # fmt: skip
        if slot.own_user:
            for write_end in (write_out, write_err):  # so that a program may open them by name, as /dev/stdout
                os.fchown(write_end, slot.uid, slot.uid)
        fds = [source_fd, stdin_fd, write_out, write_err, write_note, ask_fd, write_answer]
        namespace = [slot.pid_namespace().namespace_fd] if slot.has_own_disk else []
        run.fork_server.runs.add(run.id)
        run.fork_server.send(message, [*fds, *namespace])
        for fd in set(fds):
            os.close(fd)

    def _receive_from(self, server: ForkServer) -> None:
        message = self._forks.receive(server)
        if message is None:
            self._fork_server_died(server)
            return
        kind, run_id, pid, wait_status, cpu_s, peak = message
        run = self._runs.get(run_id)
        if run is None:
            return
        now = time.monotonic()
        if kind == messages.STARTED:
            run.begin(pid, now)
            return
        if kind == messages.INTERRUPTED:
            if run.turn is not None:
                run.turn.awaits_signal = False
            if run.id in self._channels:
                self._send_output(self._channels[run.id])
            return
        run.wait_status = wait_status
        if run.slot.lost_its_namespace() and run.stop_status is None:
            run.stop_status, run.detail = RunStatus.INFRA_ERROR, "the slot's first process died"
        run.cpu_s = max(run.cpu_s, cpu_s + run.strays_cpu_s)
        run.peak_memory_bytes = max(run.peak_memory_bytes, peak)
        run.left_its_process()
        self._begin_cleaning(run, now)
        self._clean(run, now)

    def _begin_cleaning(self, run: Run, now: float) -> None:
        del self._runs[run.id]
        self._cleaning[run.id] = run
        run.ended = now
        channel = self._channels.pop(run.id, None)
        if channel is not None:
            self._send_output(channel, last=True)
            channel.close()
        if run.stop_status is None:
            run.stop_status = run.check_disk(now, [], last=True)

    def _clean(self, run: Run, now: float) -> None:
        """Answer if the slot is empty; else kill the remaining processes and check again soon."""
        self._orphans.reap([*self._runs.values(), *self._cleaning.values()])
        strays = run.slot.strays(self._orphans.found())
        if strays:
            used = procfs.usage(procfs.descendants(strays))
            run.cpu_s = max(run.cpu_s, used.cpu_s + run.strays_cpu_s)
            run.slot.kill(strays)
            return
        try:
            run.slot.wipe()
        except OSError:  # the disk is full for a moment, or a process still writes: checked again
            return
        del self._cleaning[run.id]
        run.close()
        (self._free_live if run.is_live else self._free).append(run.slot)
        self._gateway.send(*run.result(self._tier))


def _empty_input() -> int:
    """An empty input. Opened anew for each run: flags and owner of one opening would be a message to the next program."""
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def _no_pipe() -> tuple[int, int]:
    """A socket pair for the note: where programs run as our own user they could open a pipe by name, and read written
    notes."""
    ours, theirs = _socket.socketpair(
        socket.AF_UNIX, socket.SOCK_STREAM
    )  # without the wrapper's questions about each end
    return ours.detach(), theirs.detach()


def become_supervisor() -> None:
    """Process attributes: adopt orphans, survive a terminal's Ctrl-C until the gateway ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
