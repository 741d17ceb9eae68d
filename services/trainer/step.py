"""Runs one training step: one optimizer update per minibatch of a rank's share of a batch; returns metrics.

    advantages (stamped statistics) -> pack -> [credit of single tokens] -> [proximal pass] -> per minibatch:
        [trust region or keep mask over all micro-batches and ranks]
        per micro-batch: forward -> per-token loss -> share of the minibatch's loss -> backward
        clip -> update, or (early_stop_ratio) no update of this and the remaining minibatches

The gradient does not depend on packing, micro-batch size or ranks: denominators are the minibatch's global totals,
statistics are gathered over ranks, and a rank without work computes zeros beside the others. On a CPU the same batch
from the same state gives the same bits.

Independent of gRPC, versions, checkpoints and publishing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

import numpy as np
import structlog
import torch

from services.common.config.algorithm import AlgorithmConfig
from services.common.errors import InvalidRequestError
from services.common.records import MinibatchTotals, RankBatch
from services.trainer.advantages import (
    Moments,
    at_last_token,
    discounted_sums,
    distillation_advantages,
    gae,
    normalize,
    over_batch_deviation,
    reward_moments,
    scaled_by_source,
    sequence_advantages,
)
from services.trainer.losses import (
    LossError,
    PolicyLoss,
    TokenBatch,
    aggregate,
    algorithm_of,
    check_shape,
    kl_per_token,
    value_loss,
)
from services.trainer.metrics import (
    StepMetrics,
    Sums,
    Usage,
    add_mismatch,
    add_ratios,
    add_zero_gradients,
    step_metrics,
)
from services.trainer.model.micro_batches import (
    Document,
    MicroBatch,
    MinibatchContext,
    check_batch,
    forward,
    logprob_dtype,
    minibatch_context,
    pack_for_ranks,
)
from services.trainer.model.optimizer import PolicyOptimizer, Update
from services.trainer.model.policy_model import PolicyModel, Scorer
from services.trainer.ranks import Ranks

log = structlog.get_logger(__name__)
Minibatches = Seq[Seq[MicroBatch]]
BeforeUpdate = Callable[[RankBatch, torch.Tensor, torch.Tensor], None]


def with_teacher(batch: MicroBatch, logprobs: torch.Tensor, config: AlgorithmConfig) -> MicroBatch:
    """Add the teacher's term to the advantages, given the policy's own log-probabilities. No change without a teacher."""
    if config.distillation is None or batch.teacher is None:
        return batch
    advantages = distillation_advantages(
        batch.advantages,
        logprobs if config.distillation.student == "current" else batch.behaviour,
        batch.teacher,
        coefficient=config.distillation.coefficient,
        task_coefficient=config.distillation.task_coefficient,
    )
    return replace(batch, advantages=advantages)


class TrainStep:
    """Updates a model from a batch."""

    def __init__(
        self,
        model: PolicyModel,
        optimizer: PolicyOptimizer,
        config: AlgorithmConfig,
        ranks: Ranks,
        *,
        max_tokens_per_micro_batch: int,
        temperature: float = 1.0,  # of the sampling distribution that behaviour log-probabilities belong to
        reference: Scorer | None = None,
        teacher: PolicyModel | None = None,
        peak_flops: float | None = None,  # of this rank's device, for the metric mfu
    ) -> None:
        distils = config.distillation is not None and config.distillation.teacher_model is not None
        assert distils == (teacher is not None), "algorithm.distillation.teacher_model and a teacher belong together"
        assert reference is not None or not config.needs_reference, "a KL term needs a reference model"
        assert (config.value_head is None) == (model.value_head is None), "the settings and the model have a value head"
        assert temperature > 0.0, "greedy samples have no log-probabilities to train on"
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.ranks = ranks
        self.reference = reference
        self.teacher = teacher
        self._algorithm = algorithm_of(config)
        self._has_credit = config.gives_token_credit  # then advantages are normalised per token
        self.max_tokens = max_tokens_per_micro_batch
        self.temperature = temperature
        self.on_progress: Callable[[], None] = lambda: None  # called after each micro-batch's forward and backward
        self._dtype = logprob_dtype(model)
        self.vocab_size: int = model.causal_lm.get_input_embeddings().num_embeddings
        self._usage = Usage(model, ranks, peak_flops)

    def run(self, batch: RankBatch, check: BeforeUpdate | None = None) -> StepMetrics:
        """Train on one batch. A collective: every rank passes its own share of the same batch.

        ``check`` gets the batch, and of its first minibatch the sum of |trainer - engine| over the fresh tokens and their
        number. It may raise: the weights have not changed.
        """
        started = time.perf_counter()
        if self.ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.ranks.device)
        sums = Sums(self.ranks.device)
        minibatches = self._pack(batch, sums)
        # Log-probabilities under the weights at step start; None for the first minibatch if its own forward pass, with the
        # same weights, computes them anyway.
        whole = self._algorithm.needs_whole_proximal
        proximal = [
            self._logprobs(m)
            if (self._algorithm.needs_proximal or whole) and (index > 0 or (whole and len(m) > 1))
            else None
            for index, m in enumerate(minibatches)
        ]
        updates: list[Update] = []
        num_computed, stopped = 0, False
        for index, (micro_batches, totals) in enumerate(zip(minibatches, batch.minibatches, strict=True)):
            if stopped or totals.num_trained_tokens == 0:
                self.optimizer.skip()
                continue
            fresh_version = batch.training_step - 1 if index == 0 else None
            where = f"the loss {self.config.name} at training step {batch.training_step}, minibatch {index},"
            ratios, num_kept = self._backward_minibatch(
                index, micro_batches, totals, proximal[index], sums, fresh_version, where
            )
            if check is not None and index == 0:
                check(batch, sums.values["fresh_abs"], sums.values["fresh_tokens"])
            num_computed += 1
            if (limit := self.config.early_stop_ratio) is not None:
                # Over the whole minibatch, so that the result does not depend on packing.
                mean = float(self.ranks.sum(ratios)) / totals.num_trained_tokens
                stopped = mean > limit
                if stopped:
                    log.warning(
                        "step.stopped_early",
                        training_step=batch.training_step,
                        minibatch=index,
                        mean_ratio=mean,
                        limit=limit,
                    )
            if stopped or num_kept == 0:
                self.optimizer.skip()
            else:
                updates.append(self.optimizer.update())
        seconds = time.perf_counter() - started
        total = sums.reduce(self.ranks)
        return step_metrics(
            batch,
            total,
            updates,
            num_computed=num_computed,
            num_micro_batches=sum(len(m) for m in minibatches),
            seconds=seconds,
            usage=self._usage.metrics(total, seconds),
        )

    # -- preparation -------------------------------------------------------------------------------------------------

    def _pack(self, batch: RankBatch, sums: Sums) -> list[list[MicroBatch]]:
        check_batch(batch, self.ranks, self.vocab_size)
        advantages = sequence_advantages(batch.sequences, self.config)
        trained = np.array([s.sequence.num_trained_tokens for s in batch.sequences], dtype=np.float64)
        if self.config.deviation == "batch":
            rewards = self._everywhere(reward_moments(batch.sequences))
            advantages = over_batch_deviation(advantages, rewards, self.config)
        if self.config.batch_normalize_advantages and not self._has_credit:
            advantages = normalize(advantages, self._everywhere(Moments.of(advantages, trained)), self.config)
        advantages = scaled_by_source(advantages, batch.sequences)
        sums.add("sequences", len(batch.sequences))
        sums.add("reward", math.fsum(s.sequence.reward for s in batch.sequences))
        sums.add("staleness", sum(s.staleness for s in batch.sequences))
        if not self._has_credit:
            sums.add("advantage_abs", float((abs(advantages) * trained).sum()))
        # Without the teacher's scores a sequence would silently be trained on the task alone.
        asks_teacher = self.config.distillation is not None and self.config.distillation.teacher is not None
        minibatches: list[list[Document]] = [[] for _ in batch.minibatches]
        for item, advantage in zip(batch.sequences, advantages.tolist(), strict=True):
            document = Document.from_training_sequence(item, advantage)
            if asks_teacher and document.teacher is None and document.num_trained_tokens:
                raise InvalidRequestError(f"sequence {item.sequence_id} lacks the log-probabilities of the teacher")
            minibatches[item.minibatch].append(document)
        packed = pack_for_ranks(minibatches, self.max_tokens, self.ranks, self._dtype)
        return self._with_credit(packed, sums) if self._has_credit else packed

    @torch.no_grad()
    def _with_credit(self, minibatches: Minibatches, sums: Sums) -> list[list[MicroBatch]]:
        """The micro-batches with an advantage per token, by the weights at step start. A collective."""
        result: list[list[MicroBatch]] = []
        for minibatch in minibatches:
            result.append([])
            for batch in minibatch:
                result[-1].append(self._credited(batch, sums))
                self.on_progress()
        if self.config.batch_normalize_advantages:  # over the trained tokens of the global batch
            own = [batch.advantages.double() for minibatch in result for batch in minibatch]
            flat = torch.cat(own) if own else torch.zeros(0, dtype=torch.float64, device=self.ranks.device)
            moments = self._everywhere(Moments(len(flat), float(flat.sum()), float(flat.square().sum())))
            divisor = moments.divisor(self.config)
            result = [
                [replace(b, advantages=((b.advantages.double() - moments.mean) / divisor).to(self._dtype)) for b in m]
                for m in result
            ]
        for minibatch in result:
            for batch in minibatch:
                # Here with the behaviour policy's log-probabilities: the updates compute the policy's own.
                taught = with_teacher(batch, batch.behaviour, self.config)
                sums.add("advantage_abs", taught.advantages.abs().sum(dtype=torch.float64))
        return result

    def _credited(self, batch: MicroBatch, sums: Sums) -> MicroBatch:
        config, index = self.config, batch.sequence_index
        sums.add("credited", len(batch.behaviour))
        rewards = at_last_token(batch.advantages.double(), index)
        if config.kl_reward_coefficient > 0.0:
            assert self.reference is not None
            reference, *_ = forward(self.reference, batch, self.temperature)
            kl = kl_per_token(batch.behaviour, reference, "k1")
            sums.add("kl_reference", kl.sum())
            rewards = rewards - config.kl_reward_coefficient * kl.double()
        if self.teacher is not None:
            teacher, *_ = forward(self.teacher, batch, self.temperature)
            batch = replace(batch, teacher=teacher)
        if config.distillation is not None and batch.teacher is not None:
            sums.add("distillation_kl", (batch.behaviour - batch.teacher).sum(dtype=torch.float64))
        if config.advantage == "gae":
            _, _, values = forward(self.model, batch, self.temperature)
            assert values is not None
            advantages, returns = gae(rewards, values, index, config.gamma, config.gae_lambda)
            # From these ``explained_variance`` is computed.
            sums.add("value", values.sum(dtype=torch.float64))
            for name, numbers in (("return", returns), ("value_error", returns - values.double())):
                sums.add(name, numbers.sum())
                sums.add(f"{name}_squared", numbers.square().sum())
            batch = replace(batch, old_values=values, returns=returns.to(values.dtype))
        else:
            advantages = discounted_sums(rewards, index, config.gamma)
        return replace(batch, advantages=advantages.to(self._dtype))

    def _everywhere(self, own: Moments) -> Moments:
        """The moments over all ranks."""
        flat = torch.tensor([own.count, own.total, own.total_squares], dtype=torch.float64, device=self.ranks.device)
        return Moments(*self.ranks.sum(flat).tolist())

    @torch.no_grad()
    def _logprobs(self, micro_batches: Seq[MicroBatch]) -> list[torch.Tensor]:
        found = []
        for micro_batch in micro_batches:
            found.append(forward(self.model, micro_batch, self.temperature)[0])
            self.on_progress()
        return found

    # -- one minibatch -----------------------------------------------------------------------------------------------

    def _backward_minibatch(
        self,
        number: int,
        micro_batches: Seq[MicroBatch],
        totals: MinibatchTotals,
        proximal: Seq[torch.Tensor] | None,
        sums: Sums,
        fresh_version: int | None,
        where: str,
    ) -> tuple[torch.Tensor, int]:
        """Compute the gradients of the minibatch.

        Returns the sum of policy / behaviour over this rank's trained tokens, [], and the number of tokens of all ranks in
        the loss: if the number is 0, the gradient is 0 and there must be no update.

        Raises:
            LossError: the loss returned an unusable result; ``where`` names the loss. On every rank.
        """
        context: MinibatchContext | None = None
        context_of = partial(minibatch_context, self._algorithm, self.config, totals=totals, ranks=self.ranks)
        not_finite = torch.zeros((), dtype=torch.int64, device=self.ranks.device)
        ratios = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        if len(micro_batches) > 1:
            current: Seq[torch.Tensor] | None = None
            taught = micro_batches
            if self._algorithm.needs_trust_region:
                # At the start of a step the proximal policy is the current one.
                current = proximal if number == 0 and proximal is not None else self._logprobs(micro_batches)
                taught = [with_teacher(m, own, self.config) for m, own in zip(micro_batches, current, strict=True)]
            context = context_of(taught, current=current, proximal=proximal)
        for index, untaught in enumerate(micro_batches):
            logprobs, entropy, values = forward(self.model, untaught, self.temperature)
            micro_batch = with_teacher(untaught, logprobs.detach(), self.config)
            own_proximal = proximal[index] if proximal is not None else logprobs.detach()
            if context is None:  # the only micro-batch: its own forward pass has all inputs
                context = context_of([micro_batch], current=[logprobs.detach()], proximal=[own_proximal])
            ratios += add_ratios(sums, number, micro_batch, logprobs)
            if fresh_version is not None:
                add_mismatch(sums, micro_batch, logprobs.detach(), fresh_version)
            given = own_proximal if self._algorithm.needs_proximal else None
            seen = logprobs.view_as(logprobs)  # keeps its gradient, for the count of tokens without one
            seen.retain_grad()
            tokens = context.tokens(index, micro_batch, seen, given)
            policy_loss = self._algorithm.loss(tokens, self.config)
            check_shape(policy_loss, tokens, where)
            finite = tokens.logprobs.isfinite() & tokens.behaviour.isfinite() & tokens.advantages.isfinite()
            not_finite += (tokens.mask & finite & ~policy_loss.per_token.isfinite()).sum()
            loss = self._loss(index, micro_batch, logprobs, tokens, policy_loss, entropy, context, sums)
            if values is not None:
                loss = loss + self._value_loss(micro_batch, values, totals, sums)
            if self.ranks.world_size > 1:  # FSDP2 averages gradients over ranks, and the loss is a sum of their shares
                loss = loss * self.ranks.world_size
            loss.backward()
            add_zero_gradients(sums, tokens, policy_loss)
            self.on_progress()
        assert context is not None
        if count := int(self.ranks.sum(not_finite)):
            raise LossError(
                f"{where} returned NaN or infinity for {count} of {context.num_kept} tokens, although their inputs are "
                "finite; expected a finite number for each. The trainer made no update"
            )
        if context.region is not None:
            share = 1.0 / self.ranks.world_size  # every rank holds the same region, and the sum is over ranks
            sums.add("m2po_eps_low", context.region.eps_low * share)
            sums.add("m2po_eps_high", context.region.eps_high * share)
            sums.add("m2po_second_moment", context.region.mean_second_moment * share)
        return ratios, context.num_kept

    def _loss(
        self,
        index: int,
        batch: MicroBatch,
        logprobs: torch.Tensor,
        tokens: TokenBatch,
        policy_loss: PolicyLoss,
        entropy: torch.Tensor,
        context: MinibatchContext,
        sums: Sums,
    ) -> torch.Tensor:
        """This micro-batch's share of the minibatch's loss. []"""
        config, mask = self.config, tokens.mask
        if self._algorithm.needs_whole_proximal:
            sums.add("left_out_tokens", len(batch.behaviour) - mask.sum())
        per_token = policy_loss.per_token
        for name, count in policy_loss.counts.items():
            sums.add(name, count)
        if self.reference is not None and config.kl_coefficient > 0.0:
            with torch.no_grad():
                reference_logprobs, *_ = forward(self.reference, batch, self.temperature)
            kl = kl_per_token(logprobs, reference_logprobs, config.kl_estimator, config.kl_clamp)
            if config.kl_reward_coefficient == 0.0:
                sums.add("kl_reference", kl.sum())  # otherwise known from the sampled tokens
            per_token = per_token + config.kl_coefficient * kl
        if config.entropy_coefficient > 0.0:
            per_token = per_token - config.entropy_coefficient * entropy
        axes = (batch.sequence_index, batch.num_sequences)
        loss = aggregate(per_token, mask, *axes, context.totals, config, counted=context.counted[index])
        sums.add("loss", loss)
        sums.add("entropy", entropy.sum())
        sums.add("trained_tokens", len(batch.behaviour))
        sums.add("sole_choice_tokens", 0 if batch.drawn is None else batch.drawn.num_sole_choices)
        sums.add("tokens", batch.num_given_tokens)
        sums.add("computed", 0 if batch.is_dummy else len(batch.token_ids))
        self._usage.add(batch, sums)
        return loss

    def _value_loss(self, batch: MicroBatch, values: torch.Tensor, totals: MinibatchTotals, sums: Sums) -> torch.Tensor:
        """This micro-batch's share of the weighted value loss of the minibatch. []

        Over all trained tokens, also those that a policy loss leaves out: they have a return all the same. ``values`` come
        from the current weights and carry the gradient.
        """
        head = self.config.value_head
        assert head is not None and batch.old_values is not None and batch.returns is not None
        per_token, clipped = value_loss(values, batch.old_values, batch.returns, head.clip)
        everything = torch.ones_like(clipped)
        loss = aggregate(per_token, everything, batch.sequence_index, batch.num_sequences, totals, self.config)
        sums.add("value_loss", loss)
        sums.add("value_clipped_tokens", clipped.sum())
        return head.coefficient * loss
