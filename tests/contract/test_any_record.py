"""Any record that can be made is refused, or gives finite statistics and a batch that the trainer takes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import orjson
import torch
from hypothesis import given, settings

from services.common.config.algorithm import AlgorithmConfig
from services.common.config.training import BatchConfig
from services.common.errors import InvalidRequestError
from services.common.pb import trajectory_pb2
from services.common.records import Sampling, Segment, Trajectory
from services.common.wire import read
from services.orchestrator.buffer.assembly import Batch, assemble
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.ingest import PolicyBounds, RecordBounds, RecordRefusedError
from services.orchestrator.journal import entries
from services.trainer.advantages import sequence_advantages
from services.trainer.model.micro_batches import Document, check_batch
from services.trainer.model.micro_batches import pack as pack_documents
from services.trainer.ranks import Ranks
from tests.unit.orchestrator.builders import group, order, sequence

VOCABULARY, CONTEXT, NEW_TOKENS = 50, 24, 8
BOUNDS = RecordBounds({"model0": PolicyBounds(context_length=CONTEXT, vocab_size=VOCABULARY)})
ORDER = replace(order(size=2), sampling=Sampling(max_new_tokens=NEW_TOKENS))

WILD = (
    "ids",
    "logprobs",
    "kept",
    "version",
    "temperature",
    "reward",
    "outcome",
    "metrics",
    "names",
    "numbers",
    "times",
    "sizes",
)
wild_floats, wild_ints = st.floats(), st.integers(-(2**31), 2**31 - 1)


@st.composite
def trajectories(draw: st.DrawFn) -> trajectory_pb2.Trajectory:
    """Good but for up to two kinds of values, which may be anything."""
    faults = draw(st.sets(st.sampled_from(WILD), max_size=2))

    def value(kind: str, good: st.SearchStrategy[Any], wild: st.SearchStrategy[Any]) -> Any:
        return draw(wild if kind in faults and draw(st.booleans()) else good)

    def segment(is_policy: bool) -> trajectory_pb2.Segment:
        size = value("sizes", st.integers(1, 3), st.integers(0, 2 * NEW_TOKENS))
        ids = [value("ids", st.integers(0, VOCABULARY - 1), wild_ints) for _ in range(size)]
        found = trajectory_pb2.Segment(
            source=trajectory_pb2.TOKEN_SOURCE_POLICY if is_policy else trajectory_pb2.TOKEN_SOURCE_ENVIRONMENT,
            token_ids=np.array(ids, "<i4").tobytes(),
            weight_version=-1,
        )
        if is_policy:
            said = [value("logprobs", st.floats(-5, 0, width=32), st.floats(width=32)) for _ in range(size)]
            found.logprobs = np.array(said, "<f4").tobytes()
            found.weight_version = value("version", st.integers(0, 1), st.integers(-(2**63), 2**63 - 1))
            found.kept = value("kept", st.just(b""), st.binary(max_size=30))
            if "temperature" in faults:
                found.temperature = value("temperature", st.floats(0.1, 2.0), wild_floats)
        return found

    metrics = st.dictionaries(st.sampled_from(["turns", "penalty"]), st.floats(-2, 2))
    wild_metrics = st.dictionaries(st.text(max_size=3), wild_floats, max_size=3)
    found = trajectory_pb2.Trajectory(
        task_group_id="g",
        reward=value("outcome", st.floats(-2, 2), wild_floats),
        metrics=value("metrics", metrics, wild_metrics),
    )
    found.started_at.seconds = value("times", st.just(1_700_000_000), st.integers(-(2**62), 2**62))
    for _ in range(value("sizes", st.integers(1, 2), st.integers(0, 3))):
        turns = draw(st.integers(0, 2))
        first_is_policy = value("sizes", st.just(False), st.booleans())
        found.sequences.add(
            policy=value("names", st.just("model0"), st.text(max_size=3)),
            role=value("names", st.sampled_from(["agent", "judge"]), st.text(max_size=3)),
            attempt=value("numbers", st.integers(0, 1), wild_ints),
            thread=value("numbers", st.integers(0, 1), wild_ints),
            parent=value("numbers", st.sampled_from([None, *range(len(found.sequences))]), wild_ints),
            origin=draw(st.integers(0, 3)),
            reward=value("reward", st.sampled_from([0.0, 1.0, -0.5]), wild_floats),
            stop_reason=draw(st.integers(1, 5)),
            metrics=value("metrics", metrics, wild_metrics),
            segments=[segment(first_is_policy), *(segment(turn % 2 == 0) for turn in range(turns))],
        )
    return found


def taken(proto: trajectory_pb2.Trajectory) -> Trajectory | None:
    """The accepted record; None for a refused one, with a permitted error."""
    try:
        record = read(Trajectory, proto, replica_id="a")
        BOUNDS.check(record, ORDER, {"model0": 1})
    except (InvalidRequestError, RecordRefusedError):
        return None
    return record


def test_any_record_is_refused_or_trained() -> None:
    seen: Counter[bool] = Counter()

    @settings(max_examples=60)
    @given(st.lists(trajectories(), min_size=2, max_size=2))
    def goes_through(protos: list[trajectory_pb2.Trajectory]) -> None:
        records_taken = [taken(proto) for proto in protos]
        seen.update(record is not None for record in records_taken)
        train(records_taken)

    goes_through()
    assert seen[True] >= 20 and seen[False] >= 20, "a door that takes everything, or nothing, would pass as well"


def train(found: list[Trajectory | None]) -> None:
    """All the way from the door to the trainer's packed documents."""
    experience = ExperiencePipeline({"model0": BatchConfig(size=1, dynamic_sampling=False)}, 3, Counter())
    made = group("g", 2)
    experience.issued(made)
    for index, record in enumerate(found):
        record = record or taken_instead(index)
        line = orjson.dumps(entries.to_json(record), option=orjson.OPT_SERIALIZE_NUMPY)
        record = replace(entries.from_json(Trajectory, orjson.loads(line)), index=index)
        made.resolve(record)
        for verdict in experience.resolved(made, record):
            assert math.isfinite(verdict.mean) and math.isfinite(verdict.std)
    groups, statistics = experience.take_batch("model0", 1)
    batch_record, sequences = assemble("model0", 1, groups, 1, statistics)
    batch_record = entries.from_json(entries.BatchRecord, orjson.loads(orjson.dumps(entries.to_json(batch_record))))
    share = Batch(record=batch_record, sequences=sequences, replayed=False).share(0, 1)
    assert all(math.isfinite(value) for value in batch_record.statistics.values())
    check_batch(share, Ranks(rank=0, world_size=1, device=torch.device("cpu")), VOCABULARY)
    for advantage in ("grpo", "dr_grpo", "rloo", "reinforce"):
        advantages = sequence_advantages(share.sequences, AlgorithmConfig(advantage=advantage))
        assert np.isfinite(advantages.astype(np.float32)).all()
    documents = [Document.from_training_sequence(item, 0.0) for item in share.sequences]
    trained = [
        int(token)
        for packed in pack_documents(documents, 16)
        for token in packed.targets.each(packed.targets.token_ids)
    ]
    assert sorted(trained) == sorted(int(token) for d in documents for token in d.token_ids[d.loss_mask])


def taken_instead(index: int) -> Trajectory:
    """In place of the refused records: the batch needs sequences."""
    made = sequence(float(index))
    said = Segment.policy([1, 2], [-0.1, -0.2], 0)
    return Trajectory(
        task_group_id="g", index=index, sequences=(replace(made, segments=(made.segments[0], said)),), reward=0.0
    )
