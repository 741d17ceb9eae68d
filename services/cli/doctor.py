"""``rollmill doctor``: whether a policy has learned, and which failures the rows of a run's metrics show.

    rows -> PolicyRows of each policy -> RULES -> Finding, Learning -> Verdict

Each rule looks at the rows of one policy and returns a finding or None. A threshold has the reason beside it. They are set so
that ten healthy runs of the quickstarts raise none (``benchmarks/doctor.py``), and are far from the values of these runs, which
the reasons name. Pure functions, but for ``examine`` and ``tell``.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.console import say
from services.cli.inspect.run_state import Row, read_metrics, training_steps
from services.common.config.loading import load_resolved
from services.common.config.recipe import Recipe
from services.common.records import StepFact
from services.common.telemetry.accounts import trainer_component
from services.common.telemetry.metrics import ReportedTransfer, RowKind, StallMoment, StepKey, TrainerKey
from services.orchestrator.evaluation import kind_of
from services.orchestrator.stalls import Cause

LEAST_POINTS = 10  # with fewer there is no telling a change from noise
FIRST_MOST = 16  # a long run may learn within its first steps, and they are the beginning that counts
_LEAST_WINDOW = 4
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Change:
    """Means of the first and the last points, and the 95% interval of their difference."""

    first: float
    last: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.first:.3g} -> {self.last:.3g}, change {self.last - self.first:+.3f} ({self.low:+.3f}..{self.high:+.3f})"


def windows(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first eighth of the points (4 to 16) and the last quarter (at least 4)."""
    first = min(FIRST_MOST, max(_LEAST_WINDOW, len(values) // 8))
    return values[:first], values[-max(_LEAST_WINDOW, len(values) // 4) :]


def change(values: Sequence[float]) -> Change | None:
    """The change of a series; None with fewer than ``LEAST_POINTS`` points.

    The noise of a point is estimated from successive differences (von Neumann, 1941), which a trend does not enlarge.
    """
    if len(values) < LEAST_POINTS:
        return None
    first, last = windows(values)
    differences = [after - before for before, after in itertools.pairwise(values)]
    variance = statistics.fmean(d * d for d in differences) / 2
    half = _Z * math.sqrt(variance * (1 / len(first) + 1 / len(last)))
    begin, end = statistics.fmean(first), statistics.fmean(last)
    return Change(begin, end, end - begin - half, end - begin + half)


def medians(values: Sequence[float]) -> tuple[float, float] | None:
    """Medians of the first and the last points, which one odd step does not move; None with too few points."""
    if len(values) < LEAST_POINTS:
        return None
    first, last = windows(values)
    return statistics.median(first), statistics.median(last)


class Failure(enum.StrEnum):
    """The failures that the doctor names. A cause comes before its consequences, and reports list them in this order."""

    WEIGHTS_NOT_ARRIVING = "weights do not reach the replicas"
    SAMPLES_MASKED = "samples are masked"
    REWARD_CONSTANT = "the reward is constant"
    GROUPS_EQUAL = "all rewards of a group are equal"
    MISMATCH = "engine and trainer disagree"
    ENTROPY_GONE = "the entropy is gone"
    LENGTHS_RUN_AWAY = "responses grow without a better reward"
    NOTHING_LEARNED = "nothing was learned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A failure of one policy.

    Example: ``Finding(failure=Failure.GROUPS_EQUAL, policy="model0", evidence="98% of the tokens …",
    remedy="batch.dynamic_sampling …")``.
    """

    failure: Failure
    policy: str
    evidence: str
    """The numbers of the run, in one sentence."""
    remedy: str
    """The setting to try first, by its key in the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Whether a policy has learned: the change of its reward from the first steps to the last ones."""

    policy: str
    num_steps: int
    measured: str
    """The reward that was compared: an evaluation such as ``greedy``, or ``training rollouts``. Empty when nothing was."""
    change: Change | None = None
    evaluated: Change | None = None
    """The largest gain of any evaluation; None where none is repeated."""
    trained: Change | None = None
    """The gain of training rollouts."""

    @property
    def pays_for_something_else(self) -> bool:
        """Whether the reward of training rises while every evaluation falls."""
        falls = self.evaluated is not None and self.evaluated.high < 0
        return falls and self.trained is not None and self.trained.low > 0

    @property
    def better_answers(self) -> bool:
        """Whether evaluations, or without any the training rollouts, show a gain: a policy can learn a reward that
        does not measure the same as the evaluation."""
        judged = self.evaluated or self.change
        return judged is not None and judged.low > 0

    @property
    def learned(self) -> bool | None:
        """None when there is too little to tell."""
        return None if self.change is None else self.change.low > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The diagnosis of one run."""

    learning: tuple[Learning, ...]
    findings: tuple[Finding, ...]

    @property
    def nothing_learned(self) -> bool:
        """Whether any trained policy is known to have learned nothing."""
        return any(finding.failure is Failure.NOTHING_LEARNED for finding in self.findings)


# A step that fetched nothing is repeated every few seconds; three in a row are no lost packet.
FAILED_FETCHES = 3
# A fifth of the sampled work costs time and trains no token. Healthy runs: 0.
MASKED_SHARE = 0.2
# Healthy runs end with up to two thirds, because solved tasks have equal rewards.
EQUAL_SHARE = 0.95
# Nats. Healthy runs: below 0.001 in float32; engines in bfloat16 about 0.01 to 0.02. A ratio of e^0.05 moves clipping.
MISMATCH, MISMATCH_GROWTH = 0.05, 3.0
# The same of stale tokens, of which the policy has moved: healthy runs stay below 0.12, and a mean ratio of e^0.5 is no trust region.
MISMATCH_STALE = 0.5
# Nats per token. Healthy runs that solve their tasks end above 0.03.
ENTROPY = 0.01
# Healthy runs reach 1.6 while their evaluations rise; without a better reward the length is a failure.
LENGTH_GROWTH = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRows:
    """The rows of one policy, and facts about the policy that the rules need."""

    policy: str
    recipe: Recipe
    learning: Learning
    steps: Sequence[Row]
    """Rows of training steps, in order, each step once."""
    transfers: Sequence[ReportedTransfer]
    """Of this policy, in the order of their reports."""
    open_stalls: Mapping[str, Row]
    """Stalls that have begun and not ended, by cause."""

    def series(self, key: str) -> list[float]:
        """The values of a metric in the steps that have it."""
        return [row[key] for row in self.steps if row.get(key) is not None]

    def late(self) -> Sequence[Row]:
        """The second half of the steps."""
        return self.steps[len(self.steps) // 2 :]


Found = tuple[str, str] | None
"""What a rule finds: the evidence and the remedy."""


def weights_not_arriving(rows: PolicyRows) -> Found:
    fetched: dict[str, tuple[int, list[str]]] = {}  # by replica: the version that it holds, and the errors since
    for report in rows.transfers:
        found, (held, errors) = report.transfer, fetched.get(report.replica, (0, []))
        fetched[report.replica] = (held, [*errors, found.error]) if found.error else (found.version, [])
    told = [
        f"replica {replica} failed {len(errors)} times since version {held} ({errors[-1]})"
        for replica, (held, errors) in fetched.items()
        if len(errors) >= FAILED_FETCHES
    ]
    if not told and (stall := rows.open_stalls.get(Cause.WEIGHTS_NOT_ARRIVING)) is not None:
        told = [stall["detail"]]
    remedy = (
        "rollmill weights RUN lists the transfers; check that policies.<name>.weights.host can be reached from the replica "
        "and that its engine takes updates (weights.kept_old in its log)"
    )
    return ("; ".join(told), remedy) if told else None


def samples_masked(rows: PolicyRows) -> Found:
    late = rows.late()
    finished, failures = _sum(late, StepKey.ROLLOUTS_FINISHED), _sum(late, StepKey.FAILURES)
    timeouts, old = _sum(late, StepFact.TIMEOUTS), _sum(late, StepFact.TOKENS_MASKED)
    causes = (  # share, words, remedy
        (_share(failures - timeouts, finished + failures), "of the rollouts failed",
         "the causes are in rollmill fate RUN; correct the reward, tool or environment that raises"),
        (_share(timeouts, finished + failures), "of the rollouts ran out of time",
         "raise rollout.timeout_s, or lower sampling.max_new_tokens"),
        (_share(_sum(late, StepFact.TRUNCATED_MASKED), finished),
         "of the sequences were cut by their budget and not trained",
         "raise sampling.max_new_tokens, or set rollout.on_truncation: as_scored"),
        (_share(old, _sum(late, StepKey.NUM_TRAINED_TOKENS) + old), "of the tokens were too old",
         "raise batch.max_token_age, or lower batch.max_staleness"),
    )  # fmt: skip
    stall = rows.open_stalls.get(Cause.ALL_FAIL) or rows.open_stalls.get(Cause.MASKED)
    if stall is not None and not finished:
        return stall["detail"], causes[0][2]
    if sum(share for share, _, _ in causes) < MASKED_SHARE:
        return None
    told = ", ".join(f"{share:.0%} {words}" for share, words, _ in causes if share >= 0.01)
    return told, max(causes)[2]


def reward_constant(rows: PolicyRows) -> Found:
    rewards = rows.series(StepKey.ROLLOUT_REWARD_MEAN)
    if len(rewards) < LEAST_POINTS or max(rewards) - min(rewards) > 1e-9 or _advantage(rows) > 0:
        return None
    return (
        f"every rollout of {len(rewards)} training steps had the reward {rewards[0]:g}",
        "call the reward on one right and one wrong answer (rollmill trajectories RUN shows what it gets); look at "
        "workflow.settings.reward and the columns that it reads",
    )


def groups_equal(rows: PolicyRows) -> Found:
    late = rows.late()
    groups = _sum(late, StepKey.ROLLOUTS_FINISHED) / rows.recipe.rollout.group_size
    dropped = _share(_sum(late, StepKey.GROUPS_EQUAL_DROPPED), groups)
    idle = [row for row in late if row.get(TrainerKey.ADVANTAGE_ABS_MEAN.in_row) == 0.0]
    share = max(dropped, _share(len(idle), len(late)))
    stall = rows.open_stalls.get(Cause.ALL_FILTERED)
    enough = len(rows.steps) >= LEAST_POINTS and share >= EQUAL_SHARE and not rows.learning.learned
    if (stall is None and not enough) or reward_constant(rows) is not None:
        return None
    evidence = (
        stall["detail"]
        if stall is not None
        else f"{dropped:.0%} of the task groups were dropped for equal rewards"
        if dropped >= EQUAL_SHARE
        else f"{len(idle)} of the last {len(late)} batches had no advantage: within each group every reward was the same"
    )
    return (
        evidence,
        "tasks that are solved sometimes (data.curation), a finer reward, or a larger rollout.group_size",
    )


def mismatch(rows: PolicyRows) -> Found:
    """From the first steps on, or rising. Over fresh tokens; over all, with a higher limit, in runs that hardly train fresh ones."""
    key = TrainerKey.MISMATCH_FRESH_ABS.in_row
    fresh = [row[key] for row in rows.steps if row.get(TrainerKey.FRESH_SHARE.in_row) and key in row]
    found, limit, tokens = medians(fresh), MISMATCH, "fresh tokens"
    bound, types = rows.recipe.numerics(rows.policy)
    if fresh and (first := statistics.median(windows(fresh)[0])) > bound:
        found, limit = (first, found[1] if found else fresh[-1]), 0.0
    elif (stall := rows.open_stalls.get(Cause.NUMERICS)) and stall["component"] == trainer_component(rows.policy):
        return stall["detail"], Cause.NUMERICS.advice
    elif found is None:
        found, limit, tokens = medians(rows.series(TrainerKey.MISMATCH_ABS.in_row)), MISMATCH_STALE, "all tokens"
    if found is None or (limit and (found[1] < limit or found[1] < MISMATCH_GROWTH * found[0])):
        return None
    computed = ", ".join(f"{key} {dtype}" for key, dtype in types.items())
    return (
        f"log-probabilities of {tokens} differ by {found[0]:.2g} nats in the first steps, {found[1]:.2g} in the last "
        f"({computed}: at most {bound:g})",
        "the engine does not compute what the trainer does: the same model class and dtype (weights.publish_dtype), no "
        "quantization of the KV cache, or an algorithm with truncated importance sampling (algorithm.name: tis)",
    )


def entropy_gone(rows: PolicyRows) -> Found:
    found = medians(rows.series(TrainerKey.ENTROPY.in_row))
    if found is None or rows.learning.better_answers or found[1] >= ENTROPY or found[0] < ENTROPY:
        return None
    return (
        f"{found[0]:.2g} nats a token in the first steps, {found[1]:.2g} in the last, and no better {_judged_by(rows)}",
        "a smaller optimizer.lr, algorithm.entropy_coefficient, or algorithm.kl_coefficient; go on from a checkpoint before the "
        "fall (rollmill checkpoints RUN, rollmill export)",
    )


def lengths_run_away(rows: PolicyRows) -> Found:
    lengths = rows.series(StepKey.RESPONSE_TOKENS_MEAN)
    found, grown = medians(lengths), change(lengths)
    if found is None or grown is None or rows.learning.better_answers or grown.low <= 0:
        return None
    if found[1] < LENGTH_GROWTH * found[0]:
        return None
    return (
        f"{found[0]:.0f} tokens a response in the first steps, {found[1]:.0f} in the last, and no better {_judged_by(rows)}",
        "a reward that does not pay for length, batch.overlong_penalty, or a smaller sampling.max_new_tokens",
    )


def nothing_learned(rows: PolicyRows) -> Found:
    learning = rows.learning
    if learning.learned is not False:
        return None
    rates = rows.series(TrainerKey.LEARNING_RATE.in_row)
    applied = sum(rows.series(TrainerKey.UPDATES_APPLIED.in_row))
    _, last = windows(rows.series(TrainerKey.GRAD_NORM.in_row) or [0.0])
    remedy = "optimizer.lr, or tasks that the policy solves sometimes (rollmill fate RUN, rollmill trajectories RUN)"
    if not applied:
        remedy = "no update was applied: look at trainer/updates_skipped and the trainer's log"
    evidence = (
        f"reward of {learning.measured} {learning.change} over {learning.num_steps} steps; largest learning rate "
        f"{max(rates, default=0.0):.2g}, gradient norm {statistics.median(last):.2g}"
    )
    if learning.pays_for_something_else:
        evidence += f"; training rollouts {learning.trained}"
        remedy = "a reward that pays for what the evaluation measures: the two go apart (rollmill trajectories RUN --min-reward)"
    return evidence, remedy


def _judged_by(rows: PolicyRows) -> str:
    return "evaluation" if rows.learning.evaluated else "reward"


def _advantage(rows: PolicyRows) -> float:
    """The largest mean |advantage| of any batch."""
    return max(rows.series(TrainerKey.ADVANTAGE_ABS_MEAN.in_row), default=0.0)


def _sum(rows: Sequence[Row], key: str) -> float:
    return float(sum(row.get(key) or 0.0 for row in rows))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


RULES: dict[Failure, Callable[[PolicyRows], Found]] = {
    Failure.WEIGHTS_NOT_ARRIVING: weights_not_arriving,
    Failure.SAMPLES_MASKED: samples_masked,
    Failure.REWARD_CONSTANT: reward_constant,
    Failure.GROUPS_EQUAL: groups_equal,
    Failure.MISMATCH: mismatch,
    Failure.ENTROPY_GONE: entropy_gone,
    Failure.LENGTHS_RUN_AWAY: lengths_run_away,
    Failure.NOTHING_LEARNED: nothing_learned,
}


TRAINING = "training rollouts"


def diagnose(rows: Iterable[Row], recipe: Recipe) -> Verdict:
    """Which failures the rows show. ``rows`` are those of ``metrics/orchestrator.jsonl``, in their order."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(str(row.get("kind")), []).append(row)
    stalls: dict[tuple[str, str], Row] = {}
    for row in by_kind.get(RowKind.STALL, []):
        stalls[row["component"], row["cause"]] = row
    reports = [ReportedTransfer.from_row(row) for row in by_kind.get(RowKind.WEIGHT_TRANSFER, [])]
    evaluations = by_kind.get(RowKind.EVALUATION, [])
    trained = training_steps(by_kind.get(RowKind.TRAINING_STEP, []))
    found, findings = [], []
    for policy in recipe.trained_policies:
        steps = trained.get(policy, [])
        learned = learning(policy, steps, evaluations)
        of_policy = PolicyRows(
            policy=policy,
            recipe=recipe,
            learning=learned,
            steps=steps,
            transfers=[report for report in reports if report.transfer.policy == policy],
            open_stalls={cause: row for (_, cause), row in stalls.items() if row["moment"] == StallMoment.BEGIN},
        )
        found.append(learned)
        for failure, rule in RULES.items():
            if (seen := rule(of_policy)) is not None:
                evidence, remedy = seen
                findings.append(Finding(failure=failure, policy=policy, evidence=evidence, remedy=remedy))
    return Verdict(learning=tuple(found), findings=tuple(findings))


def learning(policy: str, steps: Sequence[Row], evaluations: Sequence[Row]) -> Learning:
    """The largest gain that any measure shows: a policy that has learned shows a gain in one measure at least.

    A greedy evaluation may be perfect before training, and the tasks of training rollouts change with a curriculum, so no
    single measure decides. But where every evaluation falls, training rollouts prove no gain: their reward may
    measure another ability. With few steps only an evaluation with a certain gain decides.
    """
    evaluated = max(_of_evaluations(policy, evaluations), key=_order, default=None)
    if evaluated is not None and len(steps) < LEAST_POINTS and evaluated[1].low <= 0:
        evaluated = None
    rewards = [row[StepKey.ROLLOUT_REWARD_MEAN] for row in steps if row.get(StepKey.ROLLOUT_REWARD_MEAN) is not None]
    trained = change(rewards)
    measures = [evaluated] if evaluated is not None else []
    if trained is not None and (evaluated is None or evaluated[1].high >= 0):
        measures.append((TRAINING, trained))
    measured, best = max(measures, key=_order, default=("", None))
    return Learning(
        policy=policy,
        num_steps=len(steps),
        measured=measured,
        change=best,
        evaluated=None if evaluated is None else evaluated[1],
        trained=trained,
    )


def _order(measure: tuple[str, Change]) -> tuple[float, float]:
    """Of equal gains the one with more room comes first: a perfect greedy score tells nothing."""
    return measure[1].low, -measure[1].first


def _of_evaluations(policy: str, rows: Sequence[Row]) -> list[tuple[str, Change]]:
    """By way of sampling: the change from the first evaluation to the last that is compared with it, paired by tasks."""
    last: dict[str, Row] = {}
    for row in rows:
        if row["kind"] == RowKind.EVALUATION and policy in row["versions"] and row.get("difference"):
            kind = kind_of(row["name"])
            if kind not in last or max(row["versions"].values()) >= max(last[kind]["versions"].values()):
                last[kind] = row
    found = []
    for kind, row in last.items():
        gain, after = row["difference"], row["mean_reward"]
        found.append((f"evaluation {kind}", Change(after - gain["value"], after, gain["low"], gain["high"])))
    return found


NOTHING_LEARNED_EXIT = 3
"""Exit code of ``rollmill run`` with ``run.fail_when_nothing_learned``."""


def examine(run_dir: Path) -> Verdict:
    """The verdict on a run, from its directory; raises ``ConfigError`` when it has no metrics."""
    return diagnose(read_metrics(run_dir), load_resolved(run_dir))


def tell(verdict: Verdict, console: Console) -> None:
    """Print whether each policy has learned, and each finding with its evidence and remedy."""
    for learning in verdict.learning:
        say(console, _learning_words(learning), "green" if learning.learned else "bold yellow", wrap=True)
    for finding in verdict.findings:
        say(console, f"{finding.policy}: {finding.failure}", "bold red")
        say(console, f"  seen: {finding.evidence}", wrap=True)
        say(console, f"  try:  {finding.remedy}", wrap=True)


def as_object(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain JSON."""
    return {
        "nothing_learned": verdict.nothing_learned,
        "learning": [{**asdict(one), "learned": one.learned} for one in verdict.learning],
        "findings": [{**asdict(one), "failure": one.failure.name.lower()} for one in verdict.findings],
    }


def _learning_words(learning: Learning) -> str:
    if learning.change is None:
        return f"{learning.policy}: no verdict: {learning.num_steps} training steps, and it takes {LEAST_POINTS} to tell a change from noise"
    verb = "learned" if learning.learned else "has not learned"
    return f"{learning.policy} {verb}: reward of {learning.measured} {learning.change}"
