"""Every metric of every kind of process: for the documentation, the dashboard, and tests. Imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.common.prometheus.metric import Metric
from services.common.prometheus.process import METRICS as PROCESS
from services.envgateway.prometheus import METRICS as ENVGATEWAY
from services.envgateway.prometheus import WORKER_METRICS as WORKER
from services.inference.prometheus import METRICS as INFERENCE
from services.orchestrator.prometheus import METRICS as ORCHESTRATOR
from services.trainer.prometheus import METRICS as TRAINER
from services.trainer.prometheus import PUBLISHER_METRICS as PUBLISHER

CATALOGUE: dict[str, tuple[Metric, ...]] = {
    "every process": PROCESS,
    "orchestrator": ORCHESTRATOR,
    "inference": INFERENCE,
    "trainer": TRAINER,
    "publisher": PUBLISHER,
    "envgateway": ENVGATEWAY,
    "worker": WORKER,
}


def markdown_table() -> str:
    """As docs/observability.md shows it."""
    rows = ["| process | metric | labels | |", "|---|---|---|---|"]
    for process, metrics in CATALOGUE.items():
        rows += [f"| {process} | `{m.name}` | {', '.join(m.labels)} | {m.help} |" for m in metrics]
    return "\n".join(rows) + "\n"


def names() -> set[str]:
    return {metric.name for metrics in CATALOGUE.values() for metric in metrics}


@dataclass(frozen=True, slots=True)
class StepMetric:
    """A number of a row ``training_step`` in metrics/orchestrator.jsonl, also in TensorBoard and ``millrace_step_metric``."""

    name: str  # with what varies in braces
    of: str  # the population that it is taken over
    help: str

    @property
    def pattern(self) -> re.Pattern[str]:
        parts = re.split(r"\{\w+\}", self.name)
        return re.compile("(.+)".join(re.escape(part) for part in parts))


_SAMPLED = "rollouts since the batch before"
_BATCH = "the batch"
_TRAINED = "trained tokens"
_FIRST = "trained tokens of the first minibatch, before any update"

STEP_METRICS: tuple[StepMetric, ...] = (
    StepMetric("rollouts_finished", _SAMPLED, "Training rollouts that brought a trajectory."),
    StepMetric("failures", _SAMPLED, "Training rollouts that ended in a failure, time-outs included."),
    StepMetric("timeouts", _SAMPLED, "Of the failures, those for want of time."),
    StepMetric("slots_cancelled", _SAMPLED, "Rollouts that were stopped because they could only have been too old."),
    StepMetric("rollout_reward_mean", _SAMPLED, "Mean reward as the workflow gave it: before every filter, penalty and transform; failures excluded. Absent where none finished."),
    StepMetric("rollout_reward/{role}/{attempt}", _SAMPLED, "The same, over the sequences of one role and attempt."),
    StepMetric("groups_equal_dropped", _SAMPLED, "Advantage groups that were dropped for equal rewards."),
    StepMetric("sequences_expired", _SAMPLED, "Finished sequences that were dropped as too old."),
    StepMetric("tokens_expired", _SAMPLED, "The tokens that the policy wrote in them."),
    StepMetric("sequences_truncated_masked", _SAMPLED, "Sequences that were compared and are not trained, because their budget cut them."),
    StepMetric("rewards_clipped", _SAMPLED, "Rewards that reward_clip changed, in complete groups."),
    StepMetric("trained_reward_mean", _SAMPLED, "Mean transformed reward of complete groups, dropped ones included."),
    StepMetric("overlong_share", _SAMPLED, "Share of judged sequences that pay overlong_penalty."),
    StepMetric("overlong_penalty_mean", _SAMPLED, "What they pay, in the mean over all judged ones."),
    StepMetric("batch_reward_mean", _BATCH, "Mean reward of its sequences as they are trained on: after penalties and transforms, replayed ones included."),
    StepMetric("num_sequences", _BATCH, "Sequences."),
    StepMetric("num_trained_tokens", _BATCH, "Tokens that are trained: written by the policy and not masked."),
    StepMetric("response_tokens_mean", _BATCH, "Trained tokens of a sequence."),
    StepMetric("staleness_mean", _BATCH, "Age of the oldest trained token of a sequence, in versions; fresh sequences."),
    StepMetric("staleness_max", _BATCH, "The largest of these."),
    StepMetric("sequences_masked", _BATCH, "Fresh sequences of which the oldest tokens are masked."),
    StepMetric("tokens_masked", _BATCH, "These tokens."),
    StepMetric("num_replayed", _BATCH, "Sequences that an earlier batch had, too."),
    StepMetric("replayed_staleness_max", _BATCH, "The largest age of these."),
    StepMetric("late_wait_s", _BATCH, "Seconds that it waited for groups that were due."),
    StepMetric("curation_skipped", "the run so far", "Draws of prompts that curation refused."),
    StepMetric("curation_solved", "prompts", "Those that count as solved."),
    StepMetric("greso_p_{kind}", "prompts", "GRESO's base probability of easy (hard) prompts."),
    StepMetric("compute_s", "the step", "Seconds that the trainer computed."),
    StepMetric("elapsed_s", "the run so far", "Seconds since its start."),
    StepMetric("trainer/loss", "minibatches", "Mean loss."),
    StepMetric("trainer/grad_norm", "updates", "Mean norm of the gradient, before clipping."),
    StepMetric("trainer/grad_norm_max", "updates", "The largest."),
    StepMetric("trainer/learning_rate", "the last update", "Learning rate."),
    StepMetric("trainer/updates_applied", "minibatches", "Updates that were made."),
    StepMetric("trainer/updates_skipped", "minibatches", "Updates that were not: gradient not finite, nothing to train, or stopped early."),
    StepMetric("trainer/entropy", _TRAINED, "Mean entropy of the distribution that the token was drawn from, in nats."),
    StepMetric("trainer/kl_reference", _TRAINED, "Mean KL to the reference model."),
    StepMetric("trainer/mismatch_abs", _FIRST, "Mean of |trainer's - engine's log-probability|."),
    StepMetric("trainer/mismatch_kl", _FIRST, "KL(engine || trainer), by k3."),
    StepMetric("trainer/mismatch_fresh_abs", _FIRST + ", that the newest version alone computed (not mixed_cache)", "The same as mismatch_abs."),
    StepMetric("trainer/mismatch_fresh_kl", "the same", "The same as mismatch_kl."),
    StepMetric("trainer/fresh_share", _FIRST, "Share of these fresh tokens."),
    StepMetric("trainer/batch_reward_mean", _BATCH, "As batch_reward_mean, by the trainer."),
    StepMetric("trainer/advantage_abs_mean", _TRAINED, "Mean |advantage|."),
    StepMetric("trainer/staleness_mean", _BATCH, "As staleness_mean, replayed sequences included."),
    StepMetric("trainer/effective_sample_share", "minibatches", "Mean effective sample size of the ratios policy / behaviour, (sum w)^2 / (n sum w^2); 1 when all weigh the same."),
    StepMetric("trainer/effective_sample_share_min", "minibatches", "The smallest."),
    StepMetric("trainer/zero_gradient_share", _TRAINED, "Share of tokens for which the policy loss has a gradient of exactly zero."),
    StepMetric("trainer/zero_gradient_of_positive_share", "trained tokens with a positive advantage", "The same."),
    StepMetric("trainer/zero_gradient_of_negative_share", "trained tokens with a negative advantage", "The same."),
    StepMetric("trainer/zero_gradient/{sign}/{cause}_share", _TRAINED, "Of it, by sign of the advantage and cause: masked (m2po_mask, rejection), dropped (by a cap or probability mask), clamped (log_ratio_clamp), clipped (the loss is flat there)."),
    StepMetric("trainer/zero_gradient/zero_advantage_share", _TRAINED, "Of it, tokens without an advantage."),
    StepMetric("trainer/sole_choice_share", _TRAINED, "Share of tokens to which truncated sampling left no alternative: they have no gradient in the weights, whatever the loss."),
    StepMetric("trainer/advantage_{sign}_share", _TRAINED, "Share of tokens with a positive (negative) advantage."),
    StepMetric("trainer/distillation_kl", "tokens of the batch that are trained", "Mean KL to the teacher."),
    StepMetric("trainer/value_mean", "tokens of the batch that are trained", "Mean of the value head at step start."),
    StepMetric("trainer/return_mean", "tokens of the batch that are trained", "Mean of the returns that it learns."),
    StepMetric("trainer/explained_variance", "tokens of the batch that are trained", "Share of the returns' variance that the values explain."),
    StepMetric("trainer/value_loss", "minibatches", "Mean loss of the value head."),
    StepMetric("trainer/m2po_{what}", "minibatches", "Mean of M2PO's bounds and second moment."),
    StepMetric("trainer/{count}_share", _TRAINED, "Share of tokens that the loss counts, such as clipped or dropped ones (docs/algorithms.md)."),
    StepMetric("trainer/num_{what}", _BATCH, "Sequences, tokens, trained tokens; micro-batches of rank 0."),
    StepMetric("trainer/training_step", "the step", "Its number."),
    StepMetric("trainer/seconds", "the step", "Seconds, all of it."),
    StepMetric("trainer/tokens_per_second", "all tokens of the batch, prompts included", "Speed over all ranks."),
    StepMetric("trainer/tflops", "a rank", "10^12 operations per second of one forward and one backward pass."),
    StepMetric("trainer/mfu", "a rank", "The same, as a share of what the device can do."),
    StepMetric("trainer/memory_peak_gib", "the rank that took most", "Memory."),
    StepMetric("trainer/snapshot_{what}", "the version", "Seconds and bytes of its snapshot."),
)  # fmt: skip


def markdown_table_of_steps() -> str:
    """As docs/observability.md shows it."""
    rows = ["| metric of a step | taken over | |", "|---|---|---|"]
    rows += [f"| `{m.name}` | {m.of} | {m.help.replace('|', chr(92) + '|')} |" for m in STEP_METRICS]
    return "\n".join(rows) + "\n"


def step_metric(name: str) -> StepMetric | None:
    """What a name in a row of a training step is; None for one that the catalogue lacks."""
    return next((metric for metric in STEP_METRICS if metric.pattern.fullmatch(name)), None)
