"""Whether a batch is what its header says, and one that the model can read, asked before anything is computed from it."""

from __future__ import annotations

import torch

from services.common.config.algorithm import AlgorithmConfig
from services.common.errors import InvalidRequestError
from services.common.types import RankBatch
from services.trainer.packing import Document
from services.trainer.sharding import Ranks


def check_batch(batch: RankBatch, ranks: Ranks, vocab_size: int) -> None:
    """A collective: every rank calls it with its own share.

    Raises:
        InvalidRequestError: a token id is none of the model's, or the denominators are not the sums of the shares, which
            would silently scale the gradient.
    """
    counted = torch.zeros(len(batch.minibatches), 2, dtype=torch.int64, device=ranks.device)
    for item in batch.sequences:
        if not 0 <= item.minibatch < len(batch.minibatches):
            raise InvalidRequestError(f"sequence {item.sequence_id} is of minibatch {item.minibatch}, "
                                      f"but the batch has {len(batch.minibatches)}")  # fmt: skip
        token_ids = item.sequence.token_ids
        unknown = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
        if len(unknown):
            raise InvalidRequestError(
                f"sequence {item.sequence_id} has the token id {unknown[0]}, and the model of {batch.policy} has ids 0 to "
                f"{vocab_size - 1}: a replica has another model or tokenizer"
            )
        counted[item.minibatch, 0] += 1
        counted[item.minibatch, 1] += item.sequence.num_trained_tokens
    stated = [[t.num_sequences, t.num_trained_tokens] for t in batch.minibatches]
    found = ranks.sum(counted).tolist()
    if found != stated:
        raise InvalidRequestError(
            f"batch {batch.training_step} of policy {batch.policy}: headers state (sequences, trained tokens) "
            f"{stated} per minibatch, the ranks hold {found}"
        )


def check_taught(sequence_id: str, document: Document, config: AlgorithmConfig) -> None:
    """Raises ``InvalidRequestError`` where a token that the teacher did not score would silently be trained on the task
    alone."""
    asked = config.distillation is not None and config.distillation.teacher is not None
    if asked and document.teacher is None and document.num_trained_tokens:
        raise InvalidRequestError(f"sequence {sequence_id} lacks the log-probabilities of the teacher")
