"""Math rows of every known layout become one form, or are refused with their position."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import DatasetError
from services.orchestrator.tasks.math_rows import answer_text, math_row


@pytest.mark.parametrize(
    ("row", "problem", "answer"),
    [
        ({"problem": "p", "answer": "204"}, "p", "204"),
        ({"problem": "p", "answer": 70}, "p", "70"),
        ({"problem": "p", "answer": 27.0}, "p", "27"),
        ({"problem": "p", "answer": -0.5}, "p", "-0.5"),
        ({"question": "q", "answer": "so 48/2 = 24.\n#### 1,072"}, "q", "1072"),
        ({"problem": " p ", "question": "q", "answer": r"\boxed{\frac{1}{2}}"}, "p", r"\frac{1}{2}"),
        ({"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "12"}}, "q", "12"),
        ({"prompt": "<｜User｜>q<｜Assistant｜>", "solutions": [r"\boxed{37}"]}, "q", "37"),
        ({"problem": "p", "answer": r"\left( 3, \frac{\pi}{2} \right)"}, "p", r"\left( 3, \frac{\pi}{2} \right)"),
        ({"problem": "p", "answer": r"x \in \boxed{1} or \boxed{2} both"}, "p", r"x \in \boxed{1} or \boxed{2} both"),
    ],
)
def test_layouts_are_understood(row: dict[str, Any], problem: str, answer: str) -> None:
    assert math_row(row, "row 1") == {"problem": problem, "answer": answer}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, "no problem"),
        ({"problem": "p"}, "no answer"),
        ({"problem": "p", "reward_model": {"ground_truth": None}}, "must be a number or text"),
        ({"problem": "p", "answer": True}, "must be a number or text"),
        ({"problem": "p", "answer": ["1"]}, "is a list"),
        ({"problem": "p", "answer": "  "}, "is empty"),
        ({"problem": "p", "answer": ""}, "is empty"),
        ({"problem": "p", "answer": None}, "the answer is null"),
        ({"problem": "p", "answer": float("nan")}, "finite"),
        ({"prompt": [{"role": "assistant", "content": "a"}], "answer": "1"}, "end with a user message"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_place(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message) as refused:
        math_row(row, "file.jsonl, row 17")
    assert "file.jsonl, row 17" in refused.value.message


ASKED = "Let's think step by step and output the final answer within \\boxed{}."


@pytest.mark.parametrize("between", [" ", "\n\n", r"\n\n", r" \n "])
def test_the_instruction_that_a_preparation_appended_is_taken_off(between: str) -> None:
    row = {"prompt": [{"role": "user", "content": f"2+2?{between}{ASKED}"}], "reward_model": {"ground_truth": "4"}}
    assert math_row(row, "row 1") == {"problem": "2+2?", "answer": "4"}


def test_the_words_of_an_instruction_stay_within_a_problem_and_in_columns_of_problems() -> None:
    inside = f"Who said: {ASKED} Guess."
    row = {"prompt": [{"role": "user", "content": inside}], "reward_model": {"ground_truth": "4"}}
    assert math_row(row, "row 1")["problem"] == inside
    assert math_row({"problem": f"p {ASKED}", "answer": "4"}, "row 1")["problem"] == f"p {ASKED}"


@given(number=st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_a_number_keeps_its_value(number: float) -> None:
    assert float(answer_text(number, "row 1")) == float(number)


SOLVE = "Solve the following math problem step by step."
LAST_LINE = "The last line of your response should be of the form Answer: {0} where {0} is the answer to the problem."
QUOTED = LAST_LINE.replace("{0} where", "{0} (without quotes) where")
OWN_LINE = "Remember to put your answer on its own line"


@pytest.mark.parametrize("head", [
    f"{SOLVE} {QUOTED.format('$Answer')}", f"{SOLVE} {QUOTED.format('$ANSWER')}", LAST_LINE.format("$Answer"), SOLVE,
    f"{SOLVE} {LAST_LINE.format('$Answer').replace('$Answer w', chr(92) + 'boxed{$Answer} w')}",
])  # fmt: skip
@pytest.mark.parametrize("tail", [
    f'{OWN_LINE} after "Answer:".', f"{OWN_LINE}.", f'{OWN_LINE} after "Answer:", and you do not need to use a \\boxed command.',
    "",
])  # fmt: skip
@pytest.mark.parametrize("column", ["chat", "prompt", "problem", "question"])
def test_the_frame_that_dapo_puts_around_a_problem_is_taken_off(head: str, tail: str, column: str) -> None:
    text = f"{head}\n\nSolve $x+1=3$.\nThe answer is a number.\n\n{tail}"
    row = {"prompt": [{"role": "user", "content": text}]} if column == "chat" else {column: text}
    assert math_row({**row, "solutions": ["2"]}, "row 1")["problem"] == "Solve $x+1=3$.\nThe answer is a number."


@pytest.mark.parametrize("problem", [
    f"Ann wrote: {SOLVE} Was she right?", f"He says: {OWN_LINE}. Why?", "The last line of a proof is Answer: 4. Is it right?", SOLVE,
])  # fmt: skip
def test_the_words_of_the_frame_stay_within_a_problem(problem: str) -> None:
    assert math_row({"prompt": problem, "solutions": ["2"]}, "row 1")["problem"] == problem
