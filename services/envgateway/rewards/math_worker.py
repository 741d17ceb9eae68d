"""A worker process that grades with Math-Verify or with reasoning-gym, or compares a program's answer, one answer at a time, until its channel closes.

A separate process can be killed: a power tower or a pathological parse never returns, and Math-Verify's own
timeouts are signals, which need the main thread. The owner keeps the deadlines.

    owner → worker   {"kind": "grade"} + truth, completion
    worker → owner   {"kind": "ready"} once, then {"kind": "graded", "outcome", "detail", "reward", "exhausted", "worn"} each

``exhausted``: the grading has used up memory or stack. ``worn`` asks to be replaced.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from services.common.dataset_rows import BOX, BuiltInReward
from services.common.extras import load_extra
from services.common.system.child import die_with_parent_if_asked, limit_memory
from services.envgateway.sandbox.bare import procfs, seccomp, wire

MEMORY_BYTES = 1 << 30
_MAX_DETAIL = 300
_WORN_BYTES = 512 << 20
Verdict = tuple[str, str] | tuple[str, str, float]  # outcome, detail, and a reward that is neither 0 nor 1
Grade = Callable[[bytes, bytes], Verdict]  # of a reference answer and a completion


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent_if_asked(signal.SIGKILL)  # a worker that is busy for ever must not outlive the gateway
    if sys.argv[2] == BuiltInReward.REASONING_GYM:
        grade: Grade = load_extra("graders", sys.argv[2])()
    else:
        grade = _load_comparer() if sys.argv[2] == COMPARISON else _load_grader()
    _restrict()
    gc.collect()
    gc.freeze()  # the collector walks the objects of a grading, not all of sympy again and again: a tenth of the time
    channel.sendall(wire.encode({"kind": "ready"}))
    frames = wire.FrameReader()
    while data := channel.recv(1 << 20):
        for _, (truth, completion) in frames.feed(data):
            exhausted = False
            try:
                outcome, detail, *reward = grade(truth, completion)
            except (MemoryError, RecursionError) as error:
                exhausted = True
                outcome, detail, *reward = "unparsed", f"grading ended with {type(error).__name__}"
            # present memory: the kernel's peak is, after an exec, also that of the parent
            worn = exhausted or procfs.resident_bytes(os.getpid()) > _WORN_BYTES
            told = {"outcome": outcome, "detail": detail[:_MAX_DETAIL], "exhausted": exhausted, "worn": worn}
            told |= {"reward": reward[0] if reward else float(outcome == "correct")}
            channel.sendall(wire.encode({"kind": "graded", **told}))


def _load_grader() -> Grade:
    logging.disable(logging.WARNING)  # Math-Verify warns on every call that its timeouts are off
    from services.envgateway.rewards.math import (
        MathComparison,
        alternatives,
        asks_for_one,
        ends_in_bare_list,
        final_answers,
        without_unit,
    )

    compared = MathComparison()

    def grade(reference: bytes, said: bytes) -> Verdict:
        truth, completion = reference.decode(), said.decode(errors="replace")
        gold = _of_the_row(lambda: compared.gold(without_unit(truth)))
        if isinstance(gold, str):
            return "grader_failed", f"the reference answer cannot be parsed: {gold}"
        if not gold:
            return "grader_failed", "the reference answer cannot be parsed"
        try:
            is_one, boxed = asks_for_one(truth), final_answers(completion)
            if not boxed and BOX.search(completion):
                return "unparsed", "the last box is empty or not closed"
            if not boxed and is_one and ends_in_bare_list(completion):
                return "wrong", "a list where one value is asked for"
            # each is the answer, or all are together
            parts = [each for part in boxed for each in alternatives(part)] if is_one else [", ".join(boxed)]
            boxed = [f"$\\boxed{{{without_unit(part)}}}$" for part in parts if part]
            for text in boxed or [completion]:
                answer = compared.answer(text)
                if not answer:
                    return "unparsed", "no answer found"
                wrong = compared.wrong(without_unit(truth), gold, text, answer)
                if wrong is not None:
                    return "wrong", wrong
            return "correct", ""
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


def _restrict() -> None:
    """No network, no programs, bounded memory: a formula is untrusted text, and sympy evaluates formulas."""
    limit_memory(MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if seccomp.is_supported():
        try:
            seccomp.refuse_common("1", may_execute=False)
        except OSError:  # a kernel without filters: the memory limit and the owner's deadline remain
            return


COMPARISON = "comparison"


def _load_comparer() -> Grade:
    """The grader of a worker that compares answers of programs."""
    from services.envgateway.judge.checks import failure, unpacked

    def grade(check: bytes, answer: bytes) -> Verdict:
        wrong = failure(unpacked(check), answer)
        return ("wrong", wrong) if wrong else ("correct", "")

    return grade


if __name__ == "__main__":
    main()
