"""The supervisor: holds every limit, decides every verdict, and leaves every slot empty.

One thread, one epoll loop, started before the gateway has any thread. It is the child subreaper, so whatever a
program leaves running becomes its child (at tier 2 the child of the slot's room) and is found. It answers one gateway
and ends, with all runs, when that goes.

Invariant: an answer is sent only when the run's slot has no process and an empty work dir.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import time
from typing import Any

from . import memcg, messages, procfs
from .conversation import Conversation
from .forkserver import ForkServers, Zygote
from .gateway_end import GatewayEnd
from .line import Line, Request
from .messages import Start
from .orphans import Orphans
from .places import PROGRAM, Places
from .run import Limits, Run, never_begun
from .sealed import sealed

_PR_SET_CHILD_SUBREAPER = 36
_CLEANING_LOOK_S = 0.002
_KILL_TAKES_S = 0.05  # before a run that was stopped is looked at again


class Supervisor:
    """Runs programs for the probe (``run_alone``) and then for the gateway (``serve``)."""

    def __init__(
        self,
        gateway: socket.socket,
        tier: str,
        places: Places,
        zygote: dict[str, Any],
        memory: memcg.MemoryGroups | None = None,
    ) -> None:
        """``memory``: a cgroup for each slot, where the machine grants them."""
        self._tier = tier
        self._places = places
        self._slots = places.slots
        if memory is not None:
            for slot in self._slots:
                slot.memory = memory.slots[slot.index]
        self._line = Line(places.num(PROGRAM))
        self._runs: dict[int, Run] = {}
        self._cleaning: dict[int, Run] = {}
        self._conversations: dict[int, Conversation] = {}
        self._epoll = select.epoll()
        self._gateway = GatewayEnd(self._epoll, gateway)
        self._forks = ForkServers(
            self._epoll, {**zygote, "tier": tier, "slot_dirs": [slot.directory for slot in self._slots],
                          "accounted": memory is not None},
        )  # fmt: skip
        self._orphans = Orphans(tier, self._forks, {memory.mover_pid} if memory is not None else set())
        self._forks.start("plain")

    def start_profiles(self, profiles: list[str]) -> None:
        """Start their fork servers now rather than at the first run that asks for them."""
        for profile in profiles:
            self._forks.start(profile)

    def _zygote_died(self, zygote: Zygote) -> None:
        """Its children die with it (parent-death signal); their runs are the machine's failure, not the program's."""
        for run_id in self._forks.died(zygote):
            if run_id in self._runs:
                run = self._runs[run_id]
                if run.stop_status is None:
                    run.stop_status, run.detail = "INFRA_ERROR", "the fork server died"
                self._begin_cleaning(run, time.monotonic())
        self._forks.zygote(zygote.profile)

    # -- loop ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the gateway closes its end."""
        while self._turn():
            pass
        for slot in self._slots:
            slot.sweep()
            slot.close()

    def run_alone(self, source: bytes, limits: Limits) -> tuple[dict[str, Any], list[bytes]]:
        """One run without a gateway: the start-up probe."""
        self._gateway.hide()
        self._start({"id": 0, "mode": "program", "profile": "plain", "interactive": False, "place": PROGRAM},
                    limits, source, b"", b"")  # fmt: skip
        while not self._gateway.unsent:
            self._turn()
        self._gateway.show()
        return self._gateway.take_back()

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
        for fd, event in self._epoll.poll(wait):
            zygote = self._forks.of_fd(fd)
            if zygote is not None:
                self._receive_from(zygote)
            elif fd == self._gateway.fd:
                if event & select.EPOLLOUT:
                    self._gateway.flush()
                if event & ~select.EPOLLOUT and not self._receive_requests():
                    return False
            else:
                self._converse(fd)
        now = time.monotonic()
        due = [run for run in self._runs.values() if run.next_look <= now]
        if due:
            orphans = self._orphans.found()
            for run in due:
                self._look(run, now, orphans)
        for run in list(self._cleaning.values()):
            self._clean(run, now)
        return True

    def _look(self, run: Run, now: float, orphans: list[int]) -> None:
        run.strays_cpu_s = max(run.strays_cpu_s, run.slot.adopted_cpu_s() - run.adopted_before_s)
        status = run.look(now, run.slot.strays(orphans))
        if run.id in self._conversations:
            self._pass_on(self._conversations[run.id])
        if status is not None:
            self._stop(run, status)
        elif run.turn is not None and run.pid is not None and run.turn.look(now, run.is_flooded):
            run.zygote.send(messages.order(messages.INTERRUPT, run.id))

    def _stop(self, run: Run, status: str) -> None:
        if run.stop_status is None:
            run.stop_status = status
        # asked of the zygote, which alone knows that the pid is not yet somebody else's
        run.zygote.send(messages.order(messages.KILL, run.id))
        run.next_look = time.monotonic() + _KILL_TAKES_S

    # -- the gateway's side -------------------------------------------------------------------------------------

    def _receive_requests(self) -> bool:
        """False when the gateway has gone."""
        requests = self._gateway.receive()
        if requests is None:
            return False
        for head, blobs in requests:
            if head["kind"] == "run":
                self._begin_or_wait(Request(head, Limits(**head["limits"]), *blobs))
            elif head["kind"] == "say":
                self._say(head["id"], blobs[0])
            elif head["kind"] == "cancel":
                self._cancel(head["id"])
        return True

    def _begin_or_wait(self, request: Request) -> None:
        if request.head["place"] == PROGRAM:
            self._line.add(request)
            self._begin_next()
        else:
            self._start(request.head, request.limits, request.source, request.stdin, request.payload)

    def _begin_next(self) -> None:
        while (request := self._line.take()) is not None:
            self._start(request.head, request.limits, request.source, request.stdin, request.payload)

    def _cancel(self, run_id: int) -> None:
        if run_id in self._runs:
            self._stop(self._runs[run_id], "CANCELLED")
        elif self._line.remove(run_id):
            self._gateway.send(*never_begun(run_id, "CANCELLED", self._tier))

    def _converse(self, fd: int) -> None:
        for conversation in list(self._conversations.values()):
            if fd == conversation.ask_fd:
                conversation.flush()
            elif fd == conversation.answer_fd:
                self._pass_on(conversation)

    def _say(self, run_id: int, data: bytes) -> None:
        waiting = self._line.find(run_id)
        if waiting is not None:
            waiting.payload += data
        if run_id not in self._conversations:
            return
        conversation = self._conversations[run_id]
        if conversation.run.is_live:
            conversation.run.ask(time.monotonic())
        conversation.say(data)

    def _pass_on(self, conversation: Conversation, last: bool = False) -> None:
        run = conversation.run
        conversation.hear()
        held_back = run.turn is not None and run.turn.awaits_signal and not last
        if not conversation.heard or held_back:
            return
        if run.is_live and not last:
            whole = conversation.is_whole_frame(run.limits.answer_bytes)
            if whole is False or run.turn is None:
                run.detail = "the code wrote to the process's own channel"
                self._stop(run, "RUNTIME_ERROR")
                return
            if whole is None:  # the turn, and with it the time limit, goes on
                return
        said = conversation.take()
        if run.is_live:
            told, output = run.end_turn()
            self._gateway.send({"kind": "said", "id": run.id, **told}, [said, *output])
        else:
            self._gateway.send({"kind": "said", "id": run.id}, [said])

    # -- runs ---------------------------------------------------------------------------------------------------

    def _start(self, head: dict[str, Any], limits: Limits, source: bytes, stdin: bytes, payload: bytes) -> None:
        slot = self._places.take(head["place"])
        source_fd = sealed(source)
        stdin_fd = sealed(stdin) if stdin else _nothing()
        pipes = [os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC), _no_pipe(), os.pipe2(os.O_CLOEXEC)]
        for read_end, _ in pipes:
            os.set_blocking(read_end, False)
        out, err, note, answer = (read_end for read_end, _ in pipes)
        run = Run(head["id"], slot, limits, (out, err, note, answer), time.monotonic())
        run.zygote = self._forks.zygote(head["profile"])
        run.adopted_before_s = slot.adopted_cpu_s()
        self._runs[run.id] = run
        if head["interactive"]:
            ask_fd, say_fd = os.pipe2(os.O_CLOEXEC)
            self._conversations[run.id] = Conversation(self._epoll, run, say_fd, payload)
        else:
            ask_fd = sealed(payload) if payload else _nothing()
        message = messages.START_STRUCT.pack(
            *Start(messages.START, run.id, messages.MODES[head["mode"]], slot.index, slot.uid, limits.cpu_s,
                   limits.memory_bytes, limits.processes + self._orphans.num_others_of_user(), limits.file_bytes,
                   limits.open_files, limits.disk_bytes, limits.num_files, slot.mark)
        )  # fmt: skip
        write_ends = [write_end for _, write_end in pipes]
        if slot.own_user:
            for write_end in write_ends[:2]:  # so that it may open them by name, as /dev/stdout
                os.fchown(write_end, slot.uid, slot.uid)
        fds = [source_fd, stdin_fd, *write_ends[:3], ask_fd, write_ends[3]]
        namespace = [slot.room().namespace_fd] if slot.has_own_disk else []
        run.zygote.runs.add(run.id)
        run.zygote.send(message, [*fds, *namespace])
        for fd in fds:
            os.close(fd)

    def _receive_from(self, zygote: Zygote) -> None:
        message = self._forks.receive(zygote)
        if message is None:
            self._zygote_died(zygote)
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
            if run.id in self._conversations:
                self._pass_on(self._conversations[run.id])
            return
        run.wait_status = wait_status
        if run.slot.lost_its_room() and run.stop_status is None:
            run.stop_status, run.detail = "INFRA_ERROR", "the slot's first process died"
        run.cpu_s = max(run.cpu_s, cpu_s + run.strays_cpu_s)
        run.peak_memory_bytes = max(run.peak_memory_bytes, peak)
        run.left_its_process()
        self._begin_cleaning(run, now)
        self._clean(run, now)

    def _begin_cleaning(self, run: Run, now: float) -> None:
        del self._runs[run.id]
        self._cleaning[run.id] = run
        run.ended = now
        conversation = self._conversations.pop(run.id, None)
        if conversation is not None:
            self._pass_on(conversation, last=True)
            conversation.close()
        if run.stop_status is None:
            run.stop_status = run.look_at_disk(now, [], last=True)

    def _clean(self, run: Run, now: float) -> None:
        """Answer if the slot is empty; else kill what is there and look again soon."""
        self._orphans.reap([*self._runs.values(), *self._cleaning.values()])
        strays = run.slot.strays(self._orphans.found())
        if strays:
            used = procfs.usage(procfs.descendants(strays))
            run.cpu_s = max(run.cpu_s, used.cpu_s + run.strays_cpu_s)
            run.slot.kill(strays)
            return
        try:
            run.slot.wipe()
        except OSError:  # the disk is full for a moment, or something is still going: looked at again
            return
        del self._cleaning[run.id]
        run.close()
        self._places.give_back(run.slot)
        self._line.ended(run.id)
        self._begin_next()
        self._gateway.send(*run.result(self._tier))


def _nothing() -> int:
    """To read from. Opened anew for each run: flags and owner of one opening would be a message to the next program."""
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def _no_pipe() -> tuple[int, int]:
    """For the note: where programs run as our own user they could open a pipe by name, and read what was written."""
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def become_supervisor() -> None:
    """Process attributes: adopt orphans, survive a terminal's Ctrl-C until the gateway ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
