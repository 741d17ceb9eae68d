"""Programming rows of every known layout become one form, or are refused with their position."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import DatasetError
from services.common.text.asserted_calls import asserted_calls
from services.orchestrator.tasks.code_rows import code_row

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
    ("head", "output", "readings"),
    [
        ("def f(self, n: int) -> int:", "12", [12]),
        ("def f(n) -> str:", "12", ["12"]),
        ("def f(n) -> Any:", "12", [12, "12"]),
        ("def f(n):", "12", [12, "12"]),
        ("def g(n) -> int:", "12", [12, "12"]),
        ("def f(n) -> Optional[int]:", "12", [12]),
        ("def f(n) -> int | None:", "12", [12]),
        ("def f(n) -> 'int':", "12", [12]),
        ("def f(n) -> TreeNode:", "12", [12]),
        ("def f(n) -> int:", [[4]], [[4], [[4]]]),  # nothing fits: the head is not believed
        ("def f(n) -> int:", [4], [4]),
        ("def f(n) -> List[int]:", [4], [[4]]),
        ("def f(n) -> typing.List[int]:", [[4]], [[4]]),
        ("def f(n) -> list[list[int]]:", [[4]], [[[4]]]),
        ("def f(n) -> Optional[ListNode]:", [4], [4, [4]]),
        ("def f(n) -> int", [4], [4, [4]]),
        ("def f(n) -> int int:", [4], [4, [4]]),
        ("def f(n) -> None:", "null", [None]),
    ],
)
def test_a_reading_that_the_head_of_the_function_excludes_is_not_right(
    head: str, output: Any, readings: list[Any]
) -> None:
    row = {"problem": "p", "starter_code": head, "input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [output]}}
    case = code_row(row, "")["tests"]["cases"][0]
    assert [case["expected"], *case.get("also", [])] == readings


@pytest.mark.parametrize("column", ["problem", "starter_code", "solution"])
@pytest.mark.parametrize("head", ["def f(self, n: List[int]) -> None:", "def f(n) -> 'None':"])
def test_a_function_that_changes_its_argument_is_no_row_of_calls(column: str, head: str) -> None:
    tests = {"fn_name": "f", "inputs": [[[2, 1]]], "outputs": [[[1, 2]]]}
    with pytest.raises(DatasetError, match=r"row 7.*returns None and changes its argument"):
        code_row({"problem": "p", column: f"class Solution:\n    {head}\n        pass", "input_output": tests}, "row 7")


def test_a_dictionary_of_integers_is_marked_because_json_has_text_keys_only() -> None:
    def tests(*args: Any) -> dict[str, Any]:
        found = {"fn_name": "f", "inputs": [json.loads(json.dumps(args))], "outputs": [1]}
        return dict(code_row({"problem": "p", "input_output": found}, "")["tests"])

    assert tests({1: 2, -3: 4})["integer_keys"] and tests(5, {1: 2})["integer_keys"]
    assert tests([{1: 2}])["integer_keys"] and tests({"a": {1: 2}})["integer_keys"]
    assert not any("integer_keys" in tests(given) for given in ({"a": 1}, {"1": 2, "b": 3}, {}, [1], [{}], ["1"]))


@pytest.mark.parametrize(
    ("columns", "integers"),
    [
        ({"solution": "def f(d):\n    return d['1']"}, False),
        ({"solution": "def f(d):\n    return d.get('1', 0)"}, False),
        ({"solution": "def f(d):\n    return '1' not in d"}, False),
        ({"solution": "def f(d: Dict[str, int]):\n    return len(d)"}, False),
        ({"starter_code": "def f(d: dict[str, int]) -> int:"}, False),
        ({"starter_code": "def f(d: dict[int, int]) -> Dict[str, int]:"}, True),
        ({"solution": "def f(d):\n    return d[1]"}, True),
        ({"solution": "def f(d):\n    return d[1] == '1' or d['5']"}, True),
    ],
)
def test_the_head_and_the_solution_of_a_row_tell_whether_its_keys_are_texts(columns: Any, integers: bool) -> None:
    row = {"problem": "p", "input_output": {"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [2]}, **columns}
    assert ("integer_keys" in code_row(row, "")["tests"]) is integers


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
    ("solutions", "kept"),
    [(["a = 1", "b = 2"], ["a = 1", "b = 2"]), (["a = 1", " ", None, "b = 2"], ["a = 1", "b = 2"]), (["a = 1"], None)],
)
def test_of_several_reference_solutions_all_are_kept(solutions: list[Any], kept: list[str] | None) -> None:
    row = {"problem": "p", "tests": [{"input": "1", "output": "1"}], "solutions": solutions}
    normal = code_row(row, "row 1")
    assert normal["solution"] == "a = 1" and normal.get("solutions") == kept


def test_a_row_whose_solution_defines_sum_is_judged() -> None:
    row = {"text": "t", "code": "def sum(a, b):\n    return 6", "test_list": ["assert sum(10, 15) == 6"], "test_setup_code": ""}  # fmt: skip
    tests = code_row(row, "row 1")["tests"]
    calls = asserted_calls(tests["tests"], tests["entry_point"], names=tuple(tests["names"]))
    assert calls is not None and [call.entry_point for call in calls] == ["sum"]
