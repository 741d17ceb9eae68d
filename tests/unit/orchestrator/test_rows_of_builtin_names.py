"""Rows whose solution defines a function with the name of a built-in one."""

from __future__ import annotations

from services.common.text.asserted_calls import asserted_calls
from services.orchestrator.tasks.code_rows import code_row


def test_a_row_whose_solution_defines_sum_is_judged() -> None:
    row = {"text": "t", "code": "def sum(a, b):\n    return 6", "test_list": ["assert sum(10, 15) == 6"], "test_setup_code": ""}  # fmt: skip
    tests = code_row(row, "row 1")["tests"]
    calls = asserted_calls(tests["tests"], tests["entry_point"], names=tuple(tests["names"]))
    assert calls is not None and [call.entry_point for call in calls] == ["sum"]
