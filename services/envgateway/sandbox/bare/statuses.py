"""Statuses of ended runs and verdicts on cases: one enumeration for the supervisor, the gateway, the judge and the queues.

The values are the names of the protos' ``ExecutionStatus`` and ``Verdict`` without their prefix. Replicas convert the
protos to the ``ProgramStatus`` of workflows, which has the statuses about a program only.
"""

from __future__ import annotations

import enum

# A wait that ends this much after its time: the machine was stopped (a container that is paused, a machine that is moved), or
# had no processor. The time is no program's.
STOOD_STILL_S = 0.5


class RunStatus(enum.StrEnum):
    """Status of an ended run, of one case, or of a whole judgement."""

    OK = "OK"  # exit code 0; of a case: the answer is right, too
    RUNTIME_ERROR = "RUNTIME_ERROR"  # another exit code, or a signal
    COMPILE_ERROR = "COMPILE_ERROR"  # the source is no program
    TIME_LIMIT = "TIME_LIMIT"
    MEMORY_LIMIT = "MEMORY_LIMIT"
    OUTPUT_LIMIT = "OUTPUT_LIMIT"
    INVALID_REQUEST = "INVALID_REQUEST"
    CANCELLED = "CANCELLED"
    INFRA_ERROR = "INFRA_ERROR"  # retry the run
    WRONG_ANSWER = "WRONG_ANSWER"  # of a case or a judgement, never of a run
    INVALID_TESTS = "INVALID_TESTS"  # the tests can judge no program; never of a run

    @property
    def is_about_the_program(self) -> bool:
        """False for a status that may change in a second run, and never becomes a reward."""
        return self not in _ABOUT_OTHERS


_ABOUT_OTHERS = (RunStatus.INFRA_ERROR, RunStatus.CANCELLED, RunStatus.INVALID_TESTS)
