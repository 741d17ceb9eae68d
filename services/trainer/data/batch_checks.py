"""Checks a batch against its header and the model's vocabulary before any computation.

The orchestrator checks records when they arrive, but does not know the vocabulary of a model on another machine. This
module finds unknown ids before an embedding looks them up. A fault on one rank raises on every rank.
"""

from __future__ import annotations

import torch

from services.common.config.training.algorithm import AlgorithmConfig
from services.common.errors import InvalidRequestError
from services.common.records import kept_tokens
from services.common.records.types import RankBatch, TrainingSequence
from services.trainer.data.packing import Document
from services.trainer.ranks.sharding import Ranks


def check_batch(batch: RankBatch, ranks: Ranks, vocab_size: int) -> None:
    """Check this rank's share. A collective: every rank calls this function, and all raise when one does.

    Raises:
        InvalidRequestError: the model cannot read a sequence, or the denominators are not the sums of the shares, which
            would silently scale the gradient. The metadata names the first such ``sequence_id``.
    """
    faults = [(item.sequence_id, fault) for item in batch.sequences if (fault := _fault(item, batch, vocab_size))]
    counted = [[0, 0] for _ in batch.minibatches] + [[len(faults), 0]]
    for item in batch.sequences:
        if 0 <= item.minibatch < len(batch.minibatches):
            counted[item.minibatch][0] += 1
            counted[item.minibatch][1] += item.sequence.num_trained_tokens
    *found, (num_faults, _) = ranks.sum(torch.tensor(counted, dtype=torch.int64, device=ranks.device)).tolist()
    if faults:
        sequence_id, fault = faults[0]
        raise InvalidRequestError(
            f"sequence {sequence_id} of batch {batch.training_step} of policy {batch.policy} cannot be trained: {fault} "
            f"({len(faults)} such sequences on this rank). `millrace journal RUN` shows its record",
            sequence_id=sequence_id,
            policy=batch.policy,
            training_step=str(batch.training_step),
        )
    if num_faults:
        raise InvalidRequestError(
            f"batch {batch.training_step} of policy {batch.policy}: other ranks hold {num_faults} sequences that cannot be "
            "trained; their logs name them",
            policy=batch.policy,
            training_step=str(batch.training_step),
        )
    stated = [[t.num_sequences, t.num_trained_tokens] for t in batch.minibatches]
    if found != stated:
        raise InvalidRequestError(
            f"batch {batch.training_step} of policy {batch.policy}: headers state (sequences, trained tokens) "
            f"{stated} per minibatch, the ranks hold {found}"
        )


def _fault(item: TrainingSequence, batch: RankBatch, vocab_size: int) -> str:
    """The reason why a sequence cannot be trained; empty when there is none."""
    if not 0 <= item.minibatch < len(batch.minibatches):
        return f"its minibatch is {item.minibatch}, but the batch has {len(batch.minibatches)}"
    token_ids = item.sequence.token_ids
    unknown = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(unknown):
        return (
            f"it has the token id {unknown[0]}, and the model of {batch.policy} has ids 0 to {vocab_size - 1}: a replica "
            "has another model or tokenizer"
        )
    written = [segment for segment in item.sequence.segments if segment.num_tokens]
    if written and written[0].is_policy:
        return "it trains its first token, which no token precedes; it needs a prompt"
    for segment in written:
        try:
            kept_tokens.check(segment.kept, segment.token_ids, vocab_size)
        except ValueError as error:
            return str(error)
    return ""


def check_taught(sequence_id: str, document: Document, config: AlgorithmConfig) -> None:
    """Refuse a sequence without the teacher's scores, which would silently be trained on the task alone.

    Raises:
        InvalidRequestError: the teacher did not score the sequence.
    """
    asked = config.distillation is not None and config.distillation.teacher is not None
    if asked and document.teacher is None and document.num_trained_tokens:
        raise InvalidRequestError(f"sequence {sequence_id} lacks the log-probabilities of the teacher")
