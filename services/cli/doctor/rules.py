"""The rules of the doctor: each looks at the rows of one policy and returns a finding or None. Pure functions.

A threshold has the reason beside it. They are set so that ten healthy runs of the quickstarts raise none
(``benchmarks/doctor.py``), and are far from the values of these runs, which the reasons name.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.cli.doctor.findings import LEAST_POINTS, Failure, Finding, Learning, change, medians, windows
from services.common.config.recipe import Recipe
from services.common.records.fates import StepFact
from services.common.telemetry.components import trainer
from services.common.telemetry.metrics import StepKey, TrainerKey
from services.common.telemetry.weight_transfers import ReportedTransfer
from services.orchestrator.stalls import ADVICE, Cause

Row = Mapping[str, Any]

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

    def finding(self, failure: Failure, evidence: str, remedy: str) -> Finding:
        return Finding(failure=failure, policy=self.policy, evidence=evidence, remedy=remedy)


def weights_not_arriving(rows: PolicyRows) -> Finding | None:
    failed: dict[str, int] = {}
    held: dict[str, int] = {}
    last_error = ""
    for report in rows.transfers:
        replica, found = report.replica, report.transfer
        failed[replica] = failed.get(replica, 0) + 1 if found.error else 0
        if found.error:
            last_error = found.error
        else:
            held[replica] = found.version
    stuck = {replica: count for replica, count in failed.items() if count >= FAILED_FETCHES}
    stall = rows.open_stalls.get(Cause.WEIGHTS_NOT_ARRIVING)
    if not stuck and stall is None:
        return None
    told = [
        f"replica {replica} failed {count} times since version {held.get(replica, 0)}"
        for replica, count in stuck.items()
    ]
    told += [stall["detail"]] if stall is not None and not stuck else []
    return rows.finding(
        Failure.WEIGHTS_NOT_ARRIVING,
        f"{'; '.join(told)}{f' ({last_error})' if stuck and last_error else ''}",
        "rollmill weights RUN lists the transfers; check that policies.<name>.weights.host can be reached from the replica "
        "and that its engine takes updates (weights.kept_old in its log)",
    )


def samples_masked(rows: PolicyRows) -> Finding | None:
    late = rows.late()
    finished = _sum(late, StepKey.ROLLOUTS_FINISHED)
    failures, timeouts = _sum(late, StepKey.FAILURES), _sum(late, StepFact.TIMEOUTS)
    trained = _sum(late, StepKey.NUM_TRAINED_TOKENS)
    shares = {
        "of the rollouts failed": _share(failures - timeouts, finished + failures),
        "of the rollouts ran out of time": _share(timeouts, finished + failures),
        "of the sequences were cut by their budget and not trained": _share(
            _sum(late, StepFact.TRUNCATED_MASKED), finished
        ),
        "of the tokens were too old": _share(
            _sum(late, StepFact.TOKENS_MASKED), trained + _sum(late, StepFact.TOKENS_MASKED)
        ),
    }
    stall = rows.open_stalls.get(Cause.ALL_FAIL) or rows.open_stalls.get(Cause.MASKED)
    if stall is not None and not finished:
        return rows.finding(Failure.SAMPLES_MASKED, stall["detail"], _MASKED_REMEDIES["of the rollouts failed"])
    if sum(shares.values()) < MASKED_SHARE:
        return None
    told = ", ".join(f"{share:.0%} {words}" for words, share in shares.items() if share >= 0.01)
    return rows.finding(Failure.SAMPLES_MASKED, told, _MASKED_REMEDIES[max(shares, key=lambda words: shares[words])])


_MASKED_REMEDIES = {
    "of the rollouts failed": "the causes are in rollmill fate RUN; correct the reward, tool or environment that raises",
    "of the rollouts ran out of time": "raise rollout.timeout_s, or lower sampling.max_new_tokens",
    "of the sequences were cut by their budget and not trained": "raise sampling.max_new_tokens, or set "
    "rollout.on_truncation: as_scored",
    "of the tokens were too old": "raise batch.max_token_age, or lower batch.max_staleness",
}


def reward_constant(rows: PolicyRows) -> Finding | None:
    rewards = rows.series(StepKey.ROLLOUT_REWARD_MEAN)
    if len(rewards) < LEAST_POINTS or max(rewards) - min(rewards) > 1e-9 or _advantage(rows) > 0:
        return None
    return rows.finding(
        Failure.REWARD_CONSTANT,
        f"every rollout of {len(rewards)} training steps had the reward {rewards[0]:g}",
        "call the reward on one right and one wrong answer (rollmill trajectories RUN shows what it gets); look at "
        "workflow.settings.reward and the columns that it reads",
    )


def groups_equal(rows: PolicyRows) -> Finding | None:
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
    return rows.finding(
        Failure.GROUPS_EQUAL,
        evidence,
        "tasks that are solved sometimes (data.curation), a finer reward, or a larger rollout.group_size",
    )


def mismatch(rows: PolicyRows) -> Finding | None:
    """From the first steps on, or rising. Over fresh tokens; over all, with a higher limit, in runs that hardly train fresh ones."""
    key = TrainerKey.MISMATCH_FRESH_ABS.in_row
    fresh = [row[key] for row in rows.steps if row.get(TrainerKey.FRESH_SHARE.in_row) and key in row]
    found, limit, tokens = medians(fresh), MISMATCH, "fresh tokens"
    bound, types = rows.recipe.numerics(rows.policy)
    if fresh and (first := statistics.median(windows(fresh)[0])) > bound:
        found, limit = (first, found[1] if found else fresh[-1]), 0.0
    elif (stall := rows.open_stalls.get(Cause.NUMERICS)) and stall["component"] == trainer(rows.policy):
        return rows.finding(Failure.MISMATCH, stall["detail"], ADVICE[Cause.NUMERICS])
    elif found is None:
        found, limit, tokens = medians(rows.series(TrainerKey.MISMATCH_ABS.in_row)), MISMATCH_STALE, "all tokens"
    if found is None or (limit and (found[1] < limit or found[1] < MISMATCH_GROWTH * found[0])):
        return None
    computed = ", ".join(f"{key} {dtype}" for key, dtype in types.items())
    return rows.finding(
        Failure.MISMATCH,
        f"log-probabilities of {tokens} differ by {found[0]:.2g} nats in the first steps, {found[1]:.2g} in the last "
        f"({computed}: at most {bound:g})",
        "the engine does not compute what the trainer does: the same model class and dtype (weights.publish_dtype), no "
        "quantization of the KV cache, or an algorithm with truncated importance sampling (algorithm.name: tis)",
    )


def entropy_gone(rows: PolicyRows) -> Finding | None:
    found = medians(rows.series(TrainerKey.ENTROPY.in_row))
    if found is None or rows.learning.better_answers or found[1] >= ENTROPY or found[0] < ENTROPY:
        return None
    return rows.finding(
        Failure.ENTROPY_GONE,
        f"{found[0]:.2g} nats a token in the first steps, {found[1]:.2g} in the last, and no better {_judged_by(rows)}",
        "a smaller optimizer.lr, algorithm.entropy_coefficient, or algorithm.kl_coefficient; go on from a checkpoint before the "
        "fall (rollmill checkpoints RUN, rollmill export)",
    )


def lengths_run_away(rows: PolicyRows) -> Finding | None:
    lengths = rows.series(StepKey.RESPONSE_TOKENS_MEAN)
    found, grown = medians(lengths), change(lengths)
    if found is None or grown is None or rows.learning.better_answers or grown.low <= 0:
        return None
    if found[1] < LENGTH_GROWTH * found[0]:
        return None
    return rows.finding(
        Failure.LENGTHS_RUN_AWAY,
        f"{found[0]:.0f} tokens a response in the first steps, {found[1]:.0f} in the last, and no better {_judged_by(rows)}",
        "a reward that does not pay for length, batch.overlong_penalty, or a smaller sampling.max_new_tokens",
    )


def nothing_learned(rows: PolicyRows) -> Finding | None:
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
    return rows.finding(Failure.NOTHING_LEARNED, evidence, remedy)


def _judged_by(rows: PolicyRows) -> str:
    return "evaluation" if rows.learning.evaluated else "reward"


def _advantage(rows: PolicyRows) -> float:
    """The largest mean |advantage| of any batch."""
    return max(rows.series(TrainerKey.ADVANTAGE_ABS_MEAN.in_row), default=0.0)


def _sum(rows: Sequence[Row], key: str) -> float:
    return float(sum(row.get(key) or 0.0 for row in rows))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


RULES = (
    weights_not_arriving,
    samples_masked,
    reward_constant,
    groups_equal,
    mismatch,
    entropy_gone,
    lengths_run_away,
    nothing_learned,
)
