"""Checks dataset rows against the built-in workflows and rewards of a recipe at the start of the run.

Covers the prompts of the workflows that read one, and the fields that a reward of the gateway reads, in any workflow whose
settings name it; test code must be able to judge (``services.common.text.assert_tests``), and of training to be read
(``asserted_calls``). Does not check the prompts of users' workflows, nor rows for rewards of users: both may read any
field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.common.config.data import is_training
from services.common.config.recipe import Recipe
from services.common.errors import DatasetError
from services.common.harbor import task as harbor
from services.common.reasoning_gym import COLUMN
from services.common.records.dataset_rows import (
    TEST_KINDS,
    TRUTH_FIELDS,
    BuiltInReward,
    BuiltInWorkflow,
    prompt_in,
    truth_in,
)
from services.common.text.assert_tests import UnusableTestsError, names_of
from services.common.text.asserted_calls import asserted_calls

WITH_PROMPT = (
    BuiltInWorkflow.SINGLE_TURN,
    BuiltInWorkflow.TOOL_USE,
    BuiltInWorkflow.TOOL_MATH,
    BuiltInWorkflow.ACTOR_VERIFIER,
    BuiltInWorkflow.CODEGEN_VERIFIER,
)


def requirement(recipe: Recipe, section: str) -> Callable[[Mapping[str, Any], str], None]:
    """A check of one row; raises ``DatasetError`` for a row that the section's workflow or its reward cannot use."""
    workflow = recipe.workflow_of(section)
    field = workflow.settings.get("prompt_field")
    reward = workflow.reward
    opaque_tests = recipe.data.sections()[section].opaque_tests or ("leave_out" if is_training(section) else "together")
    skips_run = recipe.envgateway is not None and recipe.envgateway.harbor.skip_run

    def check(row: Mapping[str, Any], where: str) -> None:
        if harbor.COLUMN in row and (run := row[harbor.COLUMN]["run"]) and not skips_run:
            raise DatasetError(harbor.needs_programs(row[harbor.TASK_FIELD], run))
        tests, environment = row.get("tests"), row.get("environment")
        by_environment = environment.get("reward") if isinstance(environment, Mapping) else None
        if opaque_tests == "leave_out" and BuiltInReward.CODE in (reward, by_environment) and are_opaque(tests):
            raise DatasetError(
                f"{where}: its test code cannot be read as calls and values, so programs could forge their verdict: write "
                f"{section}.opaque_tests: together to use such rows all the same"
            )
        if workflow.name in WITH_PROMPT:
            prompt_in(row, field, where)
        if reward in (BuiltInReward.MATH, BuiltInReward.BOXED) and truth_in(row) is None:
            fields = ", ".join(TRUTH_FIELDS)
            raise DatasetError(
                f"{where} has no answer: looked for {fields} and reward_model.ground_truth in {sorted(row)}"
            )
        if reward == BuiltInReward.REASONING_GYM and COLUMN not in row:
            raise DatasetError(
                f"{where} is no task of reasoning-gym, which alone the reward reasoning_gym scores: name another reward, or "
                "rows with data.train.reasoning_gym"
            )
        if reward == BuiltInReward.CODE and not (isinstance(tests, Mapping) and tests.get("kind") in TEST_KINDS):
            raise DatasetError(
                f"{where} has no tests with a kind of {', '.join(TEST_KINDS)}; rows of other layouts are read with form: code"
            )
        if reward == BuiltInReward.CODE and isinstance(tests, Mapping) and (why := why_tests_are_unusable(tests)):
            raise DatasetError(f"{where}: {why}")

    return check


def are_opaque(tests: Any) -> bool:
    """Whether tests of a row are usable, and can be judged in the process of the program only."""
    is_code = isinstance(tests, Mapping) and tests.get("kind") == "assert"
    return is_code and not why_tests_are_unusable(tests) and asserted_calls(*_parts(tests)) is None


def why_tests_are_unusable(tests: Mapping[str, Any]) -> str:
    """Reason for which a row's tests cannot judge a program; empty for usable tests, as far as their text shows."""
    if tests.get("kind") != "assert":
        cases = tests.get("cases")
        return "" if isinstance(cases, list) and cases else "its tests have no cases"
    *parts, names = _parts(tests)
    if not all(isinstance(part, str) for part in (*parts, *names)):
        return "tests, entry_point, preamble and each of names must be text"
    try:
        names_of(*parts, names)
    except UnusableTestsError as error:
        return str(error)
    return ""


def _parts(tests: Mapping[str, Any]) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    return tests.get("tests"), tests.get("entry_point", ""), tests.get("preamble", ""), tuple(tests.get("names", ()))
