"""The grader of a worker that scores with reasoning-gym instead of Math-Verify."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable

from services.common.errors import DatasetError
from services.common.reasoning_gym import Scorer, answer_in
from services.envgateway.rewards.math.progress import ANSWER, Progress
from services.envgateway.rewards.result import RewardResult

REASONING_GYM = "reasoning_gym"  # the grader's name on the worker's command line


def load_scorer() -> Callable[[str, str, Progress], tuple[str, str] | tuple[str, str, float]]:
    """The grader of a worker: ``grade(reference, completion, progress) -> outcome, detail, reward``."""
    with contextlib.suppress(ModuleNotFoundError):  # told with the first row
        import reasoning_gym  # noqa: F401 - takes seconds, which are not an answer's
    scorer = Scorer()

    def grade(truth: str, completion: str, progress: Progress) -> tuple[str, str] | tuple[str, str, float]:
        reference = json.loads(truth)
        try:
            dataset, entry = scorer.entry(reference)
        except DatasetError as error:
            return "grader_failed", error.message
        if entry["question"] != reference["question"]:
            return (
                "grader_failed",
                "reasoning-gym makes another task here than where the row was made: install one version",
            )
        progress.reach(ANSWER)
        try:
            score = float(dataset.score_answer(answer_in(completion), entry))
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001 - a score function may raise anything on untrusted text
            return "wrong", f"{type(error).__name__}: {error}"
        if not math.isfinite(score):
            return "grader_failed", f"the score function of {reference['name']} returned {score}"
        return RewardResult.of(score).outcome.value, "", score

    return grade
