"""Caches runs of one program: a policy writes one short tool call many times, and a group does so at once.

A program's output is cached when its text shows that every run prints the same; time and memory are those of the first
run. Processes that keep a state between calls are no runs, and never come here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

from services.common.config.processes.envgateway import RunMemoryConfig, SandboxConfig
from services.envgateway.memory.deterministic import LARGEST_SOURCE, is_deterministic
from services.envgateway.memory.known import Memory, is_within_shares
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult

_LARGEST_STDIN = 1 << 16
_FINAL = (RunStatus.OK, RunStatus.RUNTIME_ERROR, RunStatus.COMPILE_ERROR)
_ENTRY_BYTES = 1000


class RunMemory(Memory[ExecutionRequest, ExecutionResult]):
    """Output of deterministic programs of this process's sandbox."""

    def __init__(
        self, config: RunMemoryConfig, sandbox: SandboxConfig, tier: Callable[[], str], counts: Counter[str]
    ) -> None:
        """``tier``: the sandbox's at present. ``counts`` gets ``remembered_runs`` and ``joined_runs``."""
        super().__init__(config.results, config.result_bytes, counts, "_runs")
        self._sandbox = sandbox
        self._tier = tier

    def _key(self, question: ExecutionRequest) -> Hashable:
        if question.language != "python" or len(question.code) > LARGEST_SOURCE or len(question.stdin) > _LARGEST_STDIN:
            return None
        return self._tier(), question  # code, stdin, limits and echo

    def _is_deterministic(self, question: ExecutionRequest) -> bool:
        return is_deterministic(question.code)

    def _is_final(self, question: ExecutionRequest, answer: ExecutionResult) -> bool:
        return (
            answer.status in _FINAL
            and answer.exit_code is not None
            and answer.signal is None
            and not answer.truncated
            and not answer.detail  # a limit's name, or the machinery's message
            and is_within_shares(
                question.limits.within(self._sandbox),
                wall_s=answer.wall_s,
                cpu_s=answer.cpu_s,
                peak_memory_bytes=answer.peak_memory_bytes,
            )
        )

    def _weight(self, question: ExecutionRequest, answer: ExecutionResult) -> int:
        texts = len(question.stdin) + len(answer.stdout) + len(answer.stderr)
        return _ENTRY_BYTES + 4 * len(question.code) + texts

    def _answer_to(self, answer: ExecutionResult, question: ExecutionRequest) -> ExecutionResult:
        return answer
