"""Decides whether an evaluation has reached the threshold of ``run.until``, and when.

A failed sample is no evidence: where its default reward reaches the threshold by itself, an evaluation with one does
not count. A pure function of finished evaluations: they are in the journal, so a restarted orchestrator finds the same
answer. Only the evaluation of the start and those of training steps count, in the order of their steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.common.config.recipe import Recipe
from services.common.config.training.until import UntilConfig
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.state import scores
from services.orchestrator.state.scores import DatasetScore

START = "start"
END = "end"
_STEP = "step-"


def evaluation_of(step: int) -> str:
    """The name of the evaluation that is due after a training step."""
    return f"{_STEP}{step}"


def step_of(evaluation_id: str) -> int | None:
    """The training step after which an evaluation was due, 0 for that of the start; None for any other.

    >>> step_of("step-30"), step_of("start"), step_of("asked-1")
    (30, 0, None)
    """
    if evaluation_id == START:
        return 0
    number = evaluation_id.removeprefix(_STEP)
    return int(number) if number != evaluation_id and number.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdState:
    """How far the run is from its threshold."""

    wanted: str  # "sampled reward at least 0.9, twice in a row"
    newest: float | None  # value of the newest evaluation that counts, the lowest of the policies'
    reached: bool
    step: int = 0  # the step of the evaluation that reached the threshold
    seconds: float = 0.0  # from the begin of the run to its result


class Threshold:
    """``run.until``, over the results of evaluations."""

    def __init__(
        self,
        config: UntilConfig,
        results: Mapping[str, EvaluationResult],
        policies: Sequence[str] = (),
        *,
        failed_reward: float | None = None,
    ) -> None:
        """``policies``: those with separate evaluations. ``failed_reward``: reward of a failed sample; None is 0 at the
        most."""
        self._config = config
        self._results = results
        self._policies = tuple(policies) or ("",)
        self._failed_reward = 0.0 if failed_reward is None else failed_reward
        self._known: tuple[int, ThresholdState] | None = None  # after so many results

    @classmethod
    def of(cls, recipe: Recipe, results: Mapping[str, EvaluationResult]) -> Threshold | None:
        """The threshold of a recipe; None without ``run.until``."""
        if recipe.run.until is None:
            return None
        apart = recipe.rollout.policies == "apart"
        policies = [policy for (policy, *_) in recipe.evaluation_compositions()] if apart else []
        return cls(recipe.run.until, results, policies, failed_reward=recipe.evaluation.failed_reward)

    @property
    def reached(self) -> bool:
        return self.state().reached

    def state(self) -> ThresholdState:
        """State after the finished evaluations."""
        if self._known is None or self._known[0] != len(self._results):
            self._known = len(self._results), self._state()
        return self._known[1]

    def _state(self) -> ThresholdState:
        in_a_row, newest = 0, None
        for step, results in self._finished():
            values = {policy: self._value(result) for policy, result in results.items()}
            known = [value for value in values.values() if value is not None]
            newest = min(known) if len(known) == len(values) else None
            held = all(self._holds(policy, results[policy], value) for policy, value in values.items())
            in_a_row = in_a_row + 1 if held else 0
            if in_a_row >= self._config.in_a_row:
                seconds = max(result.elapsed_s for result in results.values())
                return ThresholdState(wanted=self.wanted(), newest=newest, reached=True, step=step, seconds=seconds)
        return ThresholdState(wanted=self.wanted(), newest=newest, reached=False)

    def wanted(self) -> str:
        """The threshold in words."""
        config = self._config
        numbers = config.at_least
        if isinstance(numbers, dict):
            least = ", ".join(f"{policy} {number:g}" for policy, number in sorted(numbers.items()))
        else:
            least = f"{numbers:g}"
        of = f" of {config.dataset}" if config.dataset else ""
        row = f", {config.in_a_row} evaluations in a row" if config.in_a_row > 1 else ""
        return f"{config.evaluation} {config.metric}{of} at least {least}{row}"

    def _finished(self) -> Iterator[tuple[int, dict[str, EvaluationResult]]]:
        """By step: the results of all policies, of evaluations whose passes with this sampling are finished."""
        steps = {step_of(name.partition("/")[0]) for name in self._results}
        for step in sorted(step for step in steps if step is not None):
            begin = f"{evaluation_of(step) if step else START}/{self._config.evaluation}"
            # The pass of a lone policy has the name of all of them.
            names = {policy: f"{begin}/{policy}" if len(self._policies) > 1 else begin for policy in self._policies}
            if all(name in self._results for name in names.values()):
                yield step, {policy: self._results[name] for policy, name in names.items()}

    def _holds(self, policy: str, result: EvaluationResult, value: float | None) -> bool:
        least = self._config.threshold(policy)
        # Failed samples never pass. Below the threshold they can only lower the mean; otherwise they could raise the mean to the threshold.
        may_count = self._config.pass_at is not None or self._failed_reward < least
        return (
            value is not None
            and value >= least
            and (may_count or not any(found.failed for found in self._chosen(result)))
        )

    def _value(self, result: EvaluationResult) -> float | None:
        if self._config.pass_at is None:
            return scores.overall(self._chosen(result))
        return scores.overall_pass_at(self._chosen(result), self._config.pass_at)

    def _chosen(self, result: EvaluationResult) -> list[DatasetScore]:
        return [found for found in result.datasets if self._config.dataset in (None, found.name)]
