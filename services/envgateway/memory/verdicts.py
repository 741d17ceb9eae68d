"""Caches verdicts: a policy writes one short program for one task many times.

Judgements are the same when program, tests, comparison, limits and ``stop_early`` are the same.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.common.config.processes.envgateway import JudgeMemoryConfig, SandboxConfig
from services.common.text.assert_tests import UnusableTestsError
from services.common.text.literals import to_tree
from services.envgateway.judge.records import (
    AssertTests,
    CallTests,
    CaseResult,
    JudgeRequest,
    JudgeResult,
    StdinTests,
    Tests,
)
from services.envgateway.memory.deterministic import LARGEST_SOURCE, is_deterministic
from services.envgateway.memory.known import Memory, is_within_shares
from services.envgateway.sandbox.bare.statuses import RunStatus

_LARGEST_TESTS = 1 << 16  # bytes as JSON; more cost more to look up than to judge
_LARGEST_TEST_CODE = 1 << 13
_FINAL = (RunStatus.OK, RunStatus.WRONG_ANSWER, RunStatus.RUNTIME_ERROR, RunStatus.COMPILE_ERROR)
_ENTRY_BYTES = 500
_ORDERED = frozenset("ifcbltd")  # tags of ``bare.harness.plain``: numbers, bytes, lists, tuples and dictionaries


class JudgeMemory(Memory[JudgeRequest, JudgeResult]):
    """Verdicts about deterministic programs in this process's sandbox."""

    def __init__(
        self, config: JudgeMemoryConfig, sandbox: SandboxConfig, tier: Callable[[], str], counts: Counter[str]
    ) -> None:
        """``tier``: the sandbox's at present. ``counts`` gets ``remembered`` and ``joined``."""
        super().__init__(config.verdicts, config.verdict_bytes, counts)
        self._sandbox = sandbox
        self._tier = tier
        self._setting = f"{sys.version} {sandbox.model_dump_json()} ".encode()

    def _key(self, question: JudgeRequest) -> bytes | None:
        if question.language != "python" or len(question.code) > LARGEST_SOURCE:
            return None
        comparison, limits = question.comparison, question.limits
        parts = (
            question.code,
            _parts(question.tests),
            comparison.mode.value if comparison.mode is not None else None,
            comparison.tolerance,
            (limits.wall_s, limits.cpu_s, limits.memory_bytes, limits.processes, limits.output_bytes),
            question.stop_early,
        )
        try:
            judged = repr(parts).encode()  # of plain data: tells types apart (1, 1.0, True, "1")
        except (ValueError, RecursionError):  # a number of too many digits, nested too deeply
            return None
        if len(judged) > _LARGEST_TESTS:
            return None
        return hashlib.blake2b(self._setting + self._tier().encode() + b" " + judged, digest_size=32).digest()

    def _is_deterministic(self, question: JudgeRequest) -> bool:
        return _is_deterministic(question)

    def _is_final(self, question: JudgeRequest, answer: JudgeResult) -> bool:
        limits = question.limits.within(self._sandbox)

        def is_far_from_limits(case: CaseResult) -> bool:
            return (
                case.verdict in _FINAL
                and case.signal is None
                and not case.truncated
                and is_within_shares(
                    limits, wall_s=case.wall_s, cpu_s=case.cpu_s, peak_memory_bytes=case.peak_memory_bytes
                )
            )

        return answer.verdict in _FINAL and bool(answer.cases) and all(map(is_far_from_limits, answer.cases))

    def _weight(self, question: JudgeRequest, answer: JudgeResult) -> int:
        texts = sum(len(case.stdout) + len(case.stderr) + len(case.detail) for case in answer.cases)
        return 2 * _ENTRY_BYTES + _ENTRY_BYTES * len(answer.cases) + 4 * texts

    def _answer_to(self, answer: JudgeResult, question: JudgeRequest) -> JudgeResult:
        return replace(answer, request_id=question.request_id)


def _parts(tests: Tests) -> tuple[Any, ...]:
    """All parts of the tests, in builtin types."""
    match tests:
        case StdinTests(cases=cases):
            return "stdin", [(case.stdin, case.expected) for case in cases]
        case CallTests(entry_point=entry_point, cases=calls):
            return "call", entry_point, [(case.args, case.kwargs, case.expected, case.also) for case in calls]
        case AssertTests():
            return "assert", tests.tests, tests.entry_point, tests.preamble, tests.names


def _is_deterministic(request: JudgeRequest) -> bool:
    tests = request.tests
    if isinstance(tests, CallTests):
        try:
            given = [to_tree(part) for case in tests.cases for part in (case.args, case.kwargs)]
        except (ValueError, RecursionError):  # no data: the judge says so
            return False
        return _is_ordered(given) and is_deterministic(request.code, frozenset((tests.entry_point,)))
    if not isinstance(tests, AssertTests):
        return is_deterministic(request.code)
    if len(tests.tests) + len(tests.preamble) > _LARGEST_TEST_CODE:
        return False
    try:
        direct = tests.calls()
    except UnusableTestsError:
        return False
    # opaque tests may draw numbers themselves, and a function that is applied may show an address or an order
    if direct is None or any(case.applied for case in direct):
        return False
    if not _is_ordered([part for case in direct for part in (case.args, case.kwargs)]):
        return False
    return is_deterministic(request.code, frozenset(case.entry_point for case in direct))


def _is_ordered(trees: Any) -> bool:
    """Whether arguments are data without sets, whose order is random, and without objects, which have addresses."""
    waiting = list(trees)
    while waiting:
        if isinstance(tree := waiting.pop(), list):
            if not tree or tree[0] not in _ORDERED:
                return False
            waiting += tree[1:]
    return True
