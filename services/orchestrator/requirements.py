"""Checks dataset rows against the built-in workflows and rewards of a recipe, before a row is played.

Covers the workflows that read a prompt and the rewards ``math`` and ``code``. Workflows and rewards of users may read any
field, so their rows are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.common.config.data import TRAIN
from services.common.config.recipe import Recipe
from services.common.errors import DatasetError
from services.common.rows import TEST_KINDS, TRUTH_FIELDS, prompt_in, truth_in

_WITH_PROMPT = ("single_turn", "tool_use", "tool_math", "actor_verifier", "codegen_verifier")


def requirement(recipe: Recipe, section: str) -> Callable[[Mapping[str, Any], str], None]:
    """A check of one row; it raises ``DatasetError`` for a row that the section's workflow or its reward cannot use."""
    workflow = recipe.workflow if section == TRAIN else recipe.evaluation.workflow or recipe.workflow
    field, reward = workflow.settings.get("prompt_field"), workflow.settings.get("reward")

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

    return check
