"""Settings of the threshold of an evaluation that ends training (`run.until`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from pydantic import Field, field_validator

from services.common.config.base import Section
from services.common.config.data import DatasetConfig, EvaluationConfig

_PASS_AT = re.compile(r"pass@([1-9][0-9]*)")


class UntilConfig(Section):
    evaluation: str
    """The way of sampling, a name in `evaluation.samplings`, whose results count: that of the start and those of every
    `evaluation.every` steps. Evaluations at the end, or by request, do not count."""
    at_least: float | dict[str, float]
    """The least value that holds. A number for each policy with `rollout.policies: apart`, where every policy has a pass of
    its own, or one for all of them: training ends when each has reached its own in the same evaluation. A mean reward with a
    failed sample does not count, if the reward of a failed sample (`evaluation.failed_reward`, or 0) is no less than this."""
    metric: str = "reward"
    """`reward`, the mean over tasks and samples, or `pass@k` for a power of two k up to the samples of a task."""
    dataset: str | None = None
    """A name in `data.evaluation`; left out, the mean over all of them, each counted once."""
    in_a_row: int = Field(default=2, ge=1)
    """Evaluations in a row that must reach the value, so that no single lucky sample ends a run."""

    @field_validator("at_least")
    @classmethod
    def _numbers(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        for number in value.values() if isinstance(value, dict) else (value,):
            if not math.isfinite(number):
                raise ValueError(f"{number} is no threshold: write a finite number")
        if value == {}:
            raise ValueError("it names no policy: write a number, or one for each policy")
        return value

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str) -> str:
        if value != "reward" and _PASS_AT.fullmatch(value) is None:
            raise ValueError(f"{value!r} is no metric of an evaluation: write reward, or pass@k such as pass@1")
        return value

    @property
    def pass_at(self) -> int | None:
        """The k of `pass@k`; None where the mean reward counts."""
        found = _PASS_AT.fullmatch(self.metric)
        return None if found is None else int(found[1])

    def threshold(self, policy: str = "") -> float:
        """The threshold of a policy that plays apart; without a name, of all that play together."""
        return self.at_least[policy] if isinstance(self.at_least, dict) else self.at_least


def check_until(
    until: UntilConfig, evaluation: EvaluationConfig, datasets: Mapping[str, DatasetConfig], apart: Sequence[str]
) -> None:
    """Refuse a threshold on an evaluation that this recipe never makes. ``apart``: policies that have passes of their
    own.

    Raises ``ValueError``.
    """
    during = evaluation.during_samplings or list(evaluation.samplings)
    if until.evaluation not in evaluation.samplings:
        raise ValueError(
            f"run.until.evaluation names {until.evaluation!r}, which is no way of sampling of this recipe; write one of "
            f"evaluation.samplings: {sorted(evaluation.samplings)}"
        )
    if not evaluation.every:
        raise ValueError(
            "run.until ends training by an evaluation, and evaluation.every is 0, so that none is played while it lasts: set "
            "evaluation.every to a number of steps, or run.until to null"
        )
    if until.evaluation not in during:
        raise ValueError(
            f"run.until.evaluation is {until.evaluation!r}, which evaluation.during_samplings ({during}) leaves out: add it there"
        )
    if until.dataset is not None and until.dataset not in datasets:
        raise ValueError(
            f"run.until.dataset names {until.dataset!r}, which is none of data.evaluation; write one of {sorted(datasets)}"
        )
    if isinstance(until.at_least, dict) and set(until.at_least) != set(apart):
        told = (
            f"it must have a number for each of {sorted(apart)}"
            if apart
            else "the policies of this recipe play together and share one result: write one number"
        )
        raise ValueError(f"run.until.at_least is for {sorted(until.at_least)}: {told}")
    if until.pass_at is not None:
        _check_pass_at(until, until.pass_at, evaluation, datasets)


def _check_pass_at(
    until: UntilConfig, k: int, evaluation: EvaluationConfig, datasets: Mapping[str, DatasetConfig]
) -> None:
    for name, dataset in datasets.items():
        samples = dataset.samples_per_task or evaluation.samples_per_task
        if until.dataset in (None, name) and (k > samples or k & (k - 1)):
            raise ValueError(
                f"run.until.metric is {until.metric}, and data.evaluation.{name} has {samples} samples of a task: k is a power "
                "of two up to that; write another k, or raise samples_per_task"
            )
    numbers = until.at_least.values() if isinstance(until.at_least, dict) else (until.at_least,)
    for number in numbers:
        if not 0.0 < number <= 1.0:
            raise ValueError(
                f"run.until.at_least is {number:g}, and {until.metric} is a share: write one above 0, up to 1"
            )
