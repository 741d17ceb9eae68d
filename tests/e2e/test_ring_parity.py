"""Invariant 1, over a whole run: the trained tokens are the sampled ones, and every sampled token's log-probability is
that of a forward pass of the weight version named on its segment, before, across and after swaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from services.cli.run.processes import ForkServer
from services.common.config.loading import load_resolved
from services.common.records import TokenSource
from services.orchestrator.buffer.assembly import read_batch
from services.orchestrator.journal.reader import JournalReader
from services.trainer.app import build_step, open_checkpoints
from services.trainer.model.attention import Documents
from services.trainer.ranks import Ranks
from tests.e2e.conftest import Run

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture(scope="module")
def finished(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory, started_from: list[str]) -> Iterator[Run]:
    """One run for all questions; read-only."""
    run = Run(
        forks,
        tmp_path_factory.mktemp("runs"),
        "parity",
        *started_from,
        f"run.steps={STEPS}",
        "policies.model0.trainer.checkpoint_every=1",
        "policies.model0.trainer.keep_checkpoints=10",
        # Steps large enough that a token attributed to the wrong version would be far off.
        "policies.model0.optimizer.lr=3e-3",
    )
    try:
        run.finish()
        yield run
    finally:
        run.stop()


def sampled_sequences(run: Run) -> dict[str, dict[str, Any]]:
    """Sequence id to the sampled sequence in the journal."""
    return {
        f"{record['task_group_id']}/{record['index']}/{position}": sequence
        for record in run.records()
        if "task_group_id" in record and "replica_id" in record and "sequences" in record
        for position, sequence in enumerate(record["sequences"])
    }


def forward_logprobs(model: Any, token_ids: np.ndarray) -> torch.Tensor:
    """Log-probability of each token but the first, at temperature 1. [num_tokens - 1]"""
    ids = torch.tensor(np.array(token_ids), dtype=torch.int64)
    with torch.no_grad():
        logits = model(
            input_ids=ids[None], use_cache=False, documents=Documents.from_offsets(np.array([0, len(ids)]))
        ).logits[0]
    return torch.log_softmax(logits[:-1].double(), dim=-1).gather(1, ids[1:, None])[:, 0]


def test_sampled_tokens_are_trained_and_their_logprobs_are_those_of_their_version(finished: Run) -> None:
    recipe = load_resolved(finished.directory)
    sampled = sampled_sequences(finished)
    reader = JournalReader(finished.directory / "journal")
    ranks = Ranks.single()
    step, _ = build_step(recipe, "model0", recipe.model_path("model0", finished.directory), ranks)
    checkpoints = open_checkpoints(recipe, "model0", finished.directory, ranks)
    by_version: dict[int, list[tuple[np.ndarray, int, np.ndarray]]] = defaultdict(list)
    for number in range(1, STEPS + 1):
        batch = read_batch(reader, "model0", number).share(0, 1)
        assert len(batch.sequences) >= 32
        for item in batch.sequences:
            recorded = sampled[item.sequence_id]
            assert [list(s.token_ids) for s in item.sequence.segments] == [s["token_ids"] for s in recorded["segments"]]
            begin = 0
            for segment in item.sequence.segments:
                if segment.source is TokenSource.POLICY:
                    by_version[segment.weight_version].append(
                        (item.sequence.token_ids, begin, np.array(segment.logprobs))
                    )
                begin += segment.num_tokens
    reader.close()
    assert set(by_version) >= {0, 1, 2}, "tokens of several versions were trained"
    for version, segments in sorted(by_version.items()):
        if version > 0:
            checkpoints.load(version, step.model, step.optimizer)
        for token_ids, begin, logprobs in segments[:48]:
            expected = forward_logprobs(step.model.causal_lm, token_ids)[begin - 1 : begin - 1 + len(logprobs)]
            assert np.abs(expected.numpy() - logprobs).max() <= 1e-4, f"version {version}"
