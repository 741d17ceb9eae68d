"""Checks dataset rows against the built-in workflows and rewards of a recipe, before a row is played.

Covers the workflows that read a prompt and the rewards ``math`` and ``code``; tests that run as code must be able to judge
(``services.common.assert_tests``). Workflows and rewards of users may read any
field, so their rows are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.common.assert_tests import UnusableTestsError, names_of
from services.common.config.data import TRAIN
from services.common.config.recipe import Recipe
from services.common.errors import DatasetError
from services.common.rows import TEST_KINDS, TRUTH_FIELDS, prompt_in, truth_in

_WITH_PROMPT = ("single_turn", "tool_use", "tool_math", "actor_verifier", "codegen_verifier")


def requirement(recipe: Recipe, section: str) -> Callable[[Mapping[str, Any], str], None]:
    """A check of one row; it raises ``DatasetError`` for a row that the section's workflow or its reward cannot use."""
    workflow = recipe.workflow if section == TRAIN else recipe.evaluation.workflow or recipe.workflow
    field = workflow.settings.get("prompt_field")
    reward = workflow.settings.get("reward", "code" if workflow.name == "codegen_verifier" else None)

    def check(row: Mapping[str, Any], where: str) -> None:
        if workflow.name not in _WITH_PROMPT:
            return
        prompt_in(row, field, where)
        if reward == "math" and truth_in(row) is None:
            fields = ", ".join(TRUTH_FIELDS)
            raise DatasetError(
                f"{where} has no answer: looked for {fields} and reward_model.ground_truth in {sorted(row)}"
            )
        tests = row.get("tests")
        if reward == "code" and not (isinstance(tests, Mapping) and tests.get("kind") in TEST_KINDS):
            raise DatasetError(
                f"{where} has no tests with a kind of {', '.join(TEST_KINDS)}; rows of other layouts are read with form: code"
            )
        if reward == "code" and isinstance(tests, Mapping) and (why := why_tests_are_unusable(tests)):
            raise DatasetError(f"{where}: {why}")

    return check


def why_tests_are_unusable(tests: Mapping[str, Any]) -> str:
    """Why no program can be judged by a row's tests; empty when they can judge, as far as their text shows it."""
    if tests.get("kind") != "assert":
        cases = tests.get("cases")
        return "" if isinstance(cases, list) and cases else "its tests have no cases"
    parts = [tests.get("tests"), tests.get("entry_point", ""), tests.get("preamble", "")]
    names = tests.get("names", ())
    if not all(isinstance(part, str) for part in parts) or not all(isinstance(name, str) for name in names):
        return "tests, entry_point, preamble and each of names must be text"
    try:
        names_of(*parts, tuple(names))
    except UnusableTestsError as error:
        return str(error)
    return ""
