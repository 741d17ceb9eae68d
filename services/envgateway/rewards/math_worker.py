"""A worker process that grades with Math-Verify, one answer at a time, until its channel closes.

Runs on its own so that it can be killed: a power tower or a pathological parse never returns, and Math-Verify's own
timeouts are signals, which need the main thread. It keeps no deadline itself; its owner does.

    owner → worker   {"kind": "grade"} + truth, completion
    worker → owner   {"kind": "ready"} once, then {"kind": "graded", "outcome", "detail"} each
"""

from __future__ import annotations

import logging
import resource
import socket
import sys
from typing import Any

from services.envgateway.sandbox.bare import seccomp, wire

MEMORY_BYTES = 2 << 30
_MAX_DETAIL = 300


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    grade = _load_grader()
    _restrict()
    channel.sendall(wire.encode({"kind": "ready"}))
    frames = wire.FrameReader()
    while data := channel.recv(1 << 20):
        for _, (truth, completion) in frames.feed(data):
            outcome, detail = grade(truth.decode(), completion.decode(errors="replace"))
            channel.sendall(wire.encode({"kind": "graded", "outcome": outcome, "detail": detail[:_MAX_DETAIL]}))


def _load_grader() -> Any:
    logging.disable(logging.WARNING)  # Math-Verify warns on every call that its timeouts are off
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    settings = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]  # boxed answers first

    def grade(truth: str, completion: str) -> tuple[str, str]:
        try:
            gold = parse(truth, settings, parsing_timeout=None) if "$" in truth or "\\boxed" in truth else []
            gold = gold or parse(f"${truth}$", settings, parsing_timeout=None)
            if not gold:
                return "grader_failed", "the reference answer cannot be parsed"
            answer = parse(completion, settings, parsing_timeout=None)
            if not answer:
                return "unparsed", "no answer found"
            correct = verify(gold, answer, timeout_seconds=None, raise_on_error=True)
        except Exception as error:  # noqa: BLE001 - whatever sympy raises on a stranger's formula is the grader's failure
            return "grader_failed", f"{type(error).__name__}: {error}"
        return ("correct", "") if correct else ("wrong", "")

    return grade


def _restrict() -> None:
    """No network, no programs, bounded memory: a formula is a stranger's text, and sympy evaluates it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if seccomp.is_supported():
        try:
            seccomp.refuse_common("1", may_execute=False)
        except OSError:  # a kernel without filters: the memory limit and the owner's deadline remain
            return


if __name__ == "__main__":
    main()
