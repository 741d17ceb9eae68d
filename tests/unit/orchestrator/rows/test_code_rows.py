"""Programming rows of every known layout become one form, or are refused with their position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.common.errors import DatasetError
from services.orchestrator.tasks.rows.code import code_row

STDIN = {"kind": "stdin", "cases": [{"stdin": "1 2", "expected": "3"}]}
CALL = {"kind": "call", "entry_point": "add", "cases": [{"args": [1, 2], "expected": 3}]}


@pytest.mark.parametrize(
    ("tests", "normal"),
    [
        ({"tests": [{"input": "1 2", "output": "3"}]}, STDIN),
        ({"tests": json.dumps([{"input": "1 2", "output": "3", "type": "stdin_stdout"}])}, STDIN),
        ({"tests": {"inputs": ["1 2"], "outputs": ["3"]}}, STDIN),
        ({"input_output": json.dumps({"inputs": [["1 2"]], "outputs": [["3"]], "fn_name": None})}, STDIN),
        ({"input_output": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}}, CALL),
        ({"input_output": {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}}, CALL),
        (
            {"tests": [{"input": "1\n2", "output": "3", "type": "functional", "metadata": {"func_name": "add"}}]},
            CALL,
        ),
        ({"tests": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]}, CALL),
        ({"tests": [{"type": "function_call", "fn_name": "add", "input": "1\n2", "output": "3"}]}, CALL),
        ({"tests": [{"fn_name": "add", "input": [1, 2], "output": 3}]}, CALL),
        ({"tests": [{"testtype": "functional", "input": "1\n2", "output": "3"}], "metadata": '{"func_name": "add"}'}, CALL),
        ({"tests": [{"type": "stdin_stdout", "fn_name": None, "input": "1 2", "output": "3"}], "metadata": "7"}, STDIN),
        ({"tests": str([{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}])}, CALL),
        ({"tests": None, "verification_info": json.dumps({"language": "python", "test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}]})}, CALL),
        (
            {"tests": {"functional": "check(add)"}},
            {"kind": "assert", "tests": "check(add)", "entry_point": "", "preamble": ""},
        ),
        (
            {"test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], "test_setup_code": ""},
            {
                "kind": "assert",
                "tests": "assert add(1, 2) == 3\nassert add(0, 0) == 0",
                "entry_point": "",
                "preamble": "",
            },
        ),
    ],
)  # fmt: skip
def test_layouts_are_understood(tests: dict[str, Any], normal: dict[str, Any]) -> None:
    found = code_row({"problem": "Add.", **tests}, "row 1")
    for case in found["tests"].get("cases", []):
        case.pop("also", None)  # see below
    assert found == {"problem": "Add.", "tests": normal}


def test_text_arguments_are_one_value_per_line_and_never_stdin() -> None:
    pair = {"type": "function_call", "fn_name": "total", "input": "[1, 2]", "output": "3"}
    tests = code_row({"problem": "Sum a list.", "tests": [pair]}, "row 1")["tests"]
    assert tests["cases"] == [{"args": [[1, 2]], "expected": 3, "also": ["3"]}]


@pytest.mark.parametrize(
    ("outputs", "readings"),
    [
        ([[4], [5]], [[4, [4]], [5, [5]]]),  # the value, or the list of one that is the value
        ([[4], [5, 6]], [[[4], 4], [[5, 6]]]),
        (["[4]", "[5, 6]"], [[[4], 4, "[4]"], [[5, 6], "[5, 6]"]]),
        (["12", "3"], [[12, "12"], [3, "3"]]),  # numbers, or texts that look like numbers
        (["12", "abc"], [["12"], ["abc"]]),  # texts: one of them is nothing else
        (['"12"', '"a"'], [["12"], ["a"]]),
        ([True, None], [[True], [None]]),
    ],
)
def test_an_output_that_can_be_read_in_several_ways_keeps_all_of_them(outputs: list[Any], readings: list[Any]) -> None:
    tests = {"fn_name": "f", "inputs": [[1]] * len(outputs), "outputs": outputs}
    cases = code_row({"problem": "p", "input_output": tests}, "")["tests"]["cases"]
    assert [[case["expected"], *case.get("also", [])] for case in cases] == readings


@pytest.mark.parametrize(
    ("head", "also"),
    [
        ("def f(self, n: int) -> int:", []),
        ("def f(n) -> str:", ["12"]),
        ("def f(n):", ["12"]),
        ("def g(n) -> int:", ["12"]),
    ],
)
def test_a_text_is_no_result_of_a_function_that_returns_something_else(head: str, also: list[Any]) -> None:
    row = {"problem": "p", "starter_code": head, "input_output": {"fn_name": "f", "inputs": [[1]], "outputs": ["12"]}}
    assert code_row(row, "")["tests"]["cases"][0].get("also", []) == also


def test_a_dictionary_of_integers_is_marked_because_json_has_text_keys_only() -> None:
    def tests(*args: Any) -> dict[str, Any]:
        found = {"fn_name": "f", "inputs": [json.loads(json.dumps(args))], "outputs": [1]}
        return dict(code_row({"problem": "p", "input_output": found}, "")["tests"])

    assert tests({1: 2, -3: 4})["integer_keys"] and tests(5, {1: 2})["integer_keys"]
    assert not any("integer_keys" in tests(given) for given in ({"a": 1}, {"1": 2, "b": 3}, {}, [1]))


def test_returned_values_are_unwrapped_only_where_a_row_wraps_all_of_them() -> None:
    pairs = [{"fn_name": "f", "input": [1], "output": [[1]]}, {"fn_name": "f", "input": [2], "output": [[1, 2]]}]
    assert [c["expected"] for c in code_row({"problem": "p", "tests": pairs}, "")["tests"]["cases"]] == [[1], [1, 2]]
    pairs = [{"fn_name": "f", "input": [1], "output": [1]}, {"fn_name": "f", "input": [2], "output": [1, 2]}]
    assert [c["expected"] for c in code_row({"problem": "p", "tests": pairs}, "")["tests"]["cases"]] == [[1], [1, 2]]


@pytest.mark.parametrize("column", ["problem", "starter_code", "solutions"])
def test_a_method_of_solution_is_called_as_one(column: str) -> None:
    code = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
    row = {"problem": "Add.", "tests": [{"fn_name": "add", "input": [1, 2], "output": [3]}]}
    assert code_row({**row, column: [code] if column == "solutions" else code}, "")["tests"]["entry_point"] == (
        "Solution().add"
    )
    assert code_row({**row, "problem": "class Solution:\n    def address(self):"}, "")["tests"]["entry_point"] == "add"


def test_a_solution_is_taken_out_of_its_fence() -> None:
    row = {"problem": "p", "tests": [{"input": "1", "output": "1"}], "solutions": ["```python\nprint(input())\n```"]}
    assert code_row(row, "")["solution"] == "print(input())\n"


def test_humaneval_keeps_its_prompt_as_the_tests_preamble_and_its_solution_whole() -> None:
    row = {
        "prompt": "def f(x):\n",
        "canonical_solution": "    return x\n",
        "test": "def check(c): ...",
        "entry_point": "f",
    }
    normal = code_row(row, "row 1")
    assert normal["tests"] == {
        "kind": "assert", "tests": "def check(c): ...", "entry_point": "f", "preamble": "def f(x):\n",
    }  # fmt: skip
    assert normal["solution"] == "def f(x):\n    return x\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tests": []}, "no problem"),
        ({"problem": "p"}, "no tests"),
        ({"problem": "p", "tests": []}, "neither pairs"),
        ({"problem": "p", "tests": "{"}, "not valid JSON"),
        ({"problem": "p", "tests": [{"input": "1"}]}, "case 1: needs input and output"),
        ({"problem": "p", "tests": {"inputs": ["1"], "outputs": []}}, "lists of one length"),
        ({"problem": "p", "tests": [{"input": 1, "output": "1"}]}, "must be text"),
        (
            {"problem": "p", "tests": [{"input": "1", "output": "1", "type": "functional"}]},
            "do not name it: no fn_name",
        ),
        ({"problem": "p", "tests": {"inputs": [7], "outputs": [7], "fn_name": "f"}}, "must be a list"),
        ({"problem": "p", "tests": {"inputs": ["a b"], "outputs": [7], "fn_name": "f"}}, "one JSON value per line"),
        ({"problem": "p", "tests": {"inputs": ["NaN"], "outputs": [7], "fn_name": "f"}}, "NaN is no JSON"),
        ({"problem": "p", "tests": [{"input": "1", "output": "1", "type": "function_call"}]}, "do not name it"),
        ({"problem": "p", "tests": [{"input": "1", "output": "1", "type": ["new"]}]}, "type .* there are stdin_stdout"),
        (
            {"problem": "p", "tests": [{"input": "1", "output": "1"}, {"input": "1", "output": "1", "fn_name": "f"}]},
            "some cases read stdin and others call a function",
        ),
        ({"problem": "p", "verification_info": {"language": "rust", "test_cases": []}}, "only python is judged"),
        (
            {
                "problem": "p",
                "tests": [
                    {"input": "[1]", "output": "1", "metadata": {"func_name": "f"}},
                    {"input": "[1]", "output": "1", "metadata": {"func_name": "g"}},
                ],
            },
            "different functions",
        ),
    ],
)
def test_what_is_not_understood_is_refused_with_its_place(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message) as refused:
        code_row(row, "file.jsonl, row 17")
    assert "file.jsonl, row 17" in refused.value.message


@pytest.mark.parametrize(
    ("file", "rows", "kind", "with_solution"),
    [
        ("humaneval/HumanEval.jsonl", 164, "assert", True),
        ("deepcoder_codeforces/test.jsonl", 280, "stdin", False),
        ("code_contests/test.jsonl", 90, "stdin", False),
        ("leetcode/train.jsonl", 300, "assert", True),
        ("areal_rlvr_samples/rlvr_code.jsonl", 5, None, True),
    ],
)
def test_every_real_row_is_read(data_root: Path, file: str, rows: int, kind: str | None, with_solution: bool) -> None:
    lines = [orjson.loads(line) for line in (data_root / file).read_bytes().splitlines()]
    normal = [code_row(line, f"{file}, row {number}") for number, line in enumerate(lines, start=1)]
    assert len(normal) == rows
    assert all(row["tests"]["kind"] == kind for row in normal) or kind is None
    assert all(("solution" in row) == with_solution for row in normal)
    assert all(row["tests"].get("cases", [1]) for row in normal)


@pytest.mark.parametrize(
    ("solutions", "kept"),
    [(["a = 1", "b = 2"], ["a = 1", "b = 2"]), (["a = 1", " ", None, "b = 2"], ["a = 1", "b = 2"]), (["a = 1"], None)],
)
def test_of_several_reference_solutions_all_are_kept(solutions: list[Any], kept: list[str] | None) -> None:
    row = {"problem": "p", "tests": [{"input": "1", "output": "1"}], "solutions": solutions}
    normal = code_row(row, "row 1")
    assert normal["solution"] == "a = 1" and normal.get("solutions") == kept
