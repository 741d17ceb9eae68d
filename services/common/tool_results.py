"""How tool calls end, what a policy is told of it, and what is counted. Knows nothing of tools, gateways or policies.

Whether a call failed is its status, never a word in its output. Machinery that failed has no status: it is an error.
"""

from __future__ import annotations

import enum
from collections import Counter


class ToolStatus(enum.StrEnum):
    """The words under which calls are counted (``tool_errors_<status>``)."""

    OK = "ok"
    PROGRAM_ERROR = "program_error"  # the code raised, crashed or was no code
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    TOOL_ERROR = "tool_error"  # the tool says that it cannot do what it was asked
    MALFORMED_CALL = "malformed_call"  # no JSON object with name and arguments
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"  # not what the tool's schema asks for


def shown_output(status: ToolStatus, stdout: str, stderr: str = "", *, wall_s: float = 0.0, detail: str = "") -> str:
    """What a policy is told about code that was run: its output, then what went wrong.

    >>> shown_output(ToolStatus.PROGRAM_ERROR, "so far\\n", "NameError: boom\\n")
    'so far\\nNameError: boom'
    """
    parts = [stdout.rstrip()]
    match status:
        case ToolStatus.OK:
            pass
        case ToolStatus.TIME_LIMIT:
            parts.append(f"TimeoutError: stopped after {wall_s:.1f} s")
        case ToolStatus.MEMORY_LIMIT:
            parts.append("MemoryError: the program used too much memory")
        case ToolStatus.OUTPUT_LIMIT:
            parts.append("Error: the program printed too much")
        case ToolStatus.INVALID_ARGUMENTS:
            parts.append(f"Error: {detail or 'the program cannot be run'}")
        case _:
            parts.append(stderr.rstrip() or "the program failed")
    return "\n".join(part for part in parts if part) or "(no output)"


class ToolStatistics:
    """The calls of one trajectory."""

    def __init__(self) -> None:
        self._kinds: Counter[str] = Counter()
        self._tools: Counter[str] = Counter()
        self._latency_s = 0.0
        self._longest_s = 0.0

    def count(self, kind: str, latency_s: float, tool: str = "") -> None:
        """One call that ended as ``kind``: ``ok``, or a countable word for its failure."""
        self._kinds[kind] += 1
        if tool:
            self._tools[tool] += 1
        self._latency_s += latency_s
        self._longest_s = max(self._longest_s, latency_s)

    def metrics(self) -> dict[str, float]:
        """``tool_calls``, ``tool_errors``, ``tool_errors_<kind>``, ``tool_calls_<tool>``, and seconds: their sum and the
        longest."""
        errors = {f"tool_errors_{kind}": float(n) for kind, n in self._kinds.items() if kind != ToolStatus.OK}
        return {
            "tool_calls": float(self._kinds.total()),
            "tool_errors": sum(errors.values()),
            "tool_latency_s": self._latency_s,
            "tool_latency_max_s": self._longest_s,
            **errors,
            **{f"tool_calls_{tool}": float(n) for tool, n in self._tools.items()},
        }
