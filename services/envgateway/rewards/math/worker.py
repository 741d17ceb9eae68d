"""A worker process that grades with Math-Verify or with reasoning-gym, one answer at a time, until its channel closes.

A separate process can be killed: a power tower or a pathological parse never returns, and Math-Verify's own
timeouts are signals, which need the main thread. The owner keeps the deadlines.

    owner → worker   {"kind": "grade"} + truth, completion
    worker → owner   {"kind": "ready"} once, then {"kind": "graded", "outcome", "detail", "reward", "exhausted", "worn"} each

``exhausted``: the grading has used up memory or stack. ``worn`` asks to be replaced.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from services.envgateway.rewards.math.progress import ANSWER, IDLE, Progress
from services.envgateway.rewards.math.scorer import REASONING_GYM, load_scorer
from services.envgateway.sandbox.bare import procfs, wire
from services.envgateway.sandbox.bare.confine import seccomp

MEMORY_BYTES = 1 << 30
_MAX_DETAIL = 300
_WORN_BYTES = 512 << 20
_PR_SET_PDEATHSIG = 1

Verdict = tuple[str, str] | tuple[str, str, float]  # outcome, detail, and a reward that is neither 0 nor 1
Grade = Callable[[str, str, Progress], Verdict]


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    progress = Progress(int(sys.argv[2]))
    _die_with(int(sys.argv[3]))
    grade = load_scorer() if sys.argv[4] == REASONING_GYM else _load_grader()
    _restrict()
    gc.collect()
    gc.freeze()  # the collector walks the objects of a grading, not all of sympy again and again: a tenth of the time
    channel.sendall(wire.encode({"kind": "ready"}))
    frames = wire.FrameReader()
    question = 0
    while data := channel.recv(1 << 20):
        for _, (truth, completion) in frames.feed(data):
            question += 1
            progress.begin(question)
            exhausted = False
            try:
                outcome, detail, *reward = grade(truth.decode(), completion.decode(errors="replace"), progress)
            except (MemoryError, RecursionError) as error:
                exhausted = True
                outcome, detail, *reward = _exhausted(progress.read()[0], error)
            progress.reach(IDLE)
            # present memory: the kernel's peak is, after an exec, also that of the parent
            worn = exhausted or procfs.resident_bytes(os.getpid()) > _WORN_BYTES
            told = {"outcome": outcome, "detail": detail[:_MAX_DETAIL], "exhausted": exhausted, "worn": worn}
            told |= {"reward": reward[0] if reward else float(outcome == "correct")}
            channel.sendall(wire.encode({"kind": "graded", **told}))


def _exhausted(stage: int, error: BaseException) -> Verdict:
    what = f"grading ended with {type(error).__name__}"
    return ("unparsed", what) if stage == ANSWER else ("grader_failed", f"{what}, in the reference answer")


def _load_grader() -> Grade:
    logging.disable(logging.WARNING)  # Math-Verify warns on every call that its timeouts are off
    from services.envgateway.rewards.math.compare import MathComparison

    compared = MathComparison()

    def grade(truth: str, completion: str, progress: Progress) -> Verdict:
        gold = _of_the_row(lambda: compared.gold(truth))
        if isinstance(gold, str):
            return "grader_failed", f"the reference answer cannot be parsed: {gold}"
        if not gold:
            return "grader_failed", "the reference answer cannot be parsed"
        progress.reach(ANSWER)
        try:
            answer = compared.answer(completion)
            if not answer:
                return "unparsed", "no answer found"
            wrong = compared.wrong(truth, gold, completion, answer)
            return ("correct", "") if wrong is None else ("wrong", wrong)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001 - sympy may raise anything on untrusted text
            return _not_compared(gold, error)

    def _not_compared(gold: Any, error: Exception) -> Verdict:
        """The answer at fault: if the reference answer equals itself, the fault is the policy's."""
        told = f"{type(error).__name__}: {error}"
        if _of_the_row(lambda: compared.is_equal(gold, gold)) is True:
            return "wrong", told
        return "grader_failed", f"the reference answer cannot be compared: {told}"

    return grade


def _of_the_row(function: Callable[[], Any]) -> Any:
    """The function's value for a reference answer, or the text of its exception: no part of either comes from a policy."""
    try:
        return function()
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 - as above
        return f"{type(error).__name__}: {error}"


def _die_with(owner: int) -> None:
    """A worker that is busy for ever must not outlive the gateway."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner:
        sys.exit("the owner has gone")


def _restrict() -> None:
    """No network, no programs, bounded memory: a formula is untrusted text, and sympy evaluates formulas."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if seccomp.is_supported():
        try:
            seccomp.refuse_common("1", may_execute=False, accounted=False)
        except OSError:  # a kernel without filters: the memory limit and the owner's deadline remain
            return


if __name__ == "__main__":
    main()
