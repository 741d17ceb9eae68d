"""Teachers in a replica: trained sequences are scored; a rollout without scores is played again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.common.errors import ConfigError, InfrastructureError
from services.common.records import Logprobs, Purpose, Sampling, Segment, StopReason, TokenSequence
from services.inference.engine.base import ScoreRequest
from services.inference.engine.scripted import ScriptedEngine
from services.inference.rollouts import RolloutPlayer, ServedPolicy, score_request
from services.inference.workflows.base import Outcome
from services.inference.workflows.single import SingleTurn, SingleTurnSettings
from tests.unit.inference.fakes import FakeGateway, Records, make_order, played, qwen_like_chat, served_policy


class Teacher(ScriptedEngine):
    """Records its score requests; fails a given number of times."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__(version=0)
        self.failures = failures
        self.scored: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> Logprobs:
        if self.failures:
            self.failures -= 1
            raise InfrastructureError("the teacher is away")
        self.scored.append(request)
        return await super().score(request)


class Plays:
    """A workflow with a ready outcome."""

    def __init__(self, *sequences: TokenSequence) -> None:
        self.outcome = Outcome(sequences=sequences, reward=1.0)

    async def run(self, task: object, context: object) -> Outcome:
        return self.outcome


async def make_player(teacher: Teacher, infra_retries: int = 2, workflow: Any = None) -> tuple[RolloutPlayer, Records]:
    await teacher.start()
    student = await served_policy(["hello"])
    policies = {
        student.name: student,
        "teacher": ServedPolicy(name="teacher", engine=teacher, chat=qwen_like_chat(), context_length=32768),
    }
    records = Records()
    player = RolloutPlayer(
        workflows=dict.fromkeys(Purpose, workflow or SingleTurn(SingleTurnSettings())),
        policies=policies,
        gateway=FakeGateway(),
        sink=records,
        replica_id="a",
        num_slots=4,
        infra_retries=infra_retries,
        teachers={student.name: "teacher"},
    )
    return player, records


@pytest.fixture(autouse=True)
def _no_pauses_between_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.inference.rollouts._RETRY_BASE_S", 0.001)


async def test_each_sampled_token_carries_what_the_teacher_says_of_it() -> None:
    """The workflow names no policy: the default is never the teacher."""
    teacher = Teacher()
    player, records = await make_player(teacher)
    await played(player, make_order(sampling=Sampling(max_new_tokens=200, temperature=0.7)))
    assert len(records.trajectories) == 4 and not records.failures
    for trajectory in records.trajectories:
        (sequence,) = trajectory.sequences
        (said,) = [segment for segment in sequence.segments if segment.is_policy]
        asked = next(r for r in teacher.scored if r.request_id == f"g0/{trajectory.index}/0/score/0")
        assert asked.token_ids.tolist() == sequence.token_ids.tolist()
        assert asked.token_ids[asked.positions].tolist() == said.token_ids.tolist()
        assert set(asked.temperatures.tolist()) == {np.float32(0.7)}
        assert said.teacher_logprobs.tolist() == (await ScriptedEngine.score(teacher, asked)).tolist()
        assert [phase.what for phase in trajectory.timing.phases] == ["generate", "score"]


async def test_an_evaluation_asks_no_teacher() -> None:
    teacher = Teacher()
    player, records = await make_player(teacher)
    await played(player, make_order(purpose=Purpose.EVALUATION))
    assert len(records.trajectories) == 4 and not teacher.scored
    assert all(not len(s.teacher_logprobs) for t in records.trajectories for q in t.sequences for s in q.segments)


async def test_a_teacher_plays_where_an_order_names_it() -> None:
    player, records = await make_player(Teacher())
    await played(player, make_order(purpose=Purpose.EVALUATION, policies=("teacher",)))
    assert {sequence.policy for t in records.trajectories for sequence in t.sequences} == {"teacher"}


async def test_what_could_not_be_scored_is_played_again_and_never_a_trajectory_without_scores() -> None:
    teacher = Teacher(failures=2)
    player, records = await make_player(teacher)
    await played(player, make_order(indices=(0,)))
    (trajectory,) = records.trajectories
    assert player.counters.retries == 2 and trajectory.timing.num_retries == 2
    assert [r.request_id for r in teacher.scored] == ["g0/0/2/score/0"]
    away = Teacher(failures=99)
    player, records = await make_player(away, infra_retries=1)
    await played(player, make_order(indices=(0,)))
    (failure,) = records.failures
    assert failure.reason == InfrastructureError.reason and not records.trajectories


def conversation(**changes: object) -> TokenSequence:
    """Two turns, the second at a temperature of its own, with a tool result between them."""
    first = Segment.policy([10, 11], [-0.1, -0.2], 3)
    second = replace(Segment.policy([12, 13, 14], [-0.3] * 3, 4), temperature=0.5)
    segments = (Segment.environment([1, 2]), first, Segment.environment([7]), replace(second, **changes))
    return TokenSequence(policy="model0", segments=segments, reward=1.0, stop_reason=StopReason.STOP)


async def test_scores_come_back_to_the_segments_that_they_are_of() -> None:
    asked = score_request(conversation(), 0.8, "r")
    assert asked.token_ids.tolist() == [1, 2, 10, 11, 7, 12, 13, 14]
    assert asked.positions.tolist() == [2, 3, 5, 6, 7]
    assert asked.temperatures.tolist() == pytest.approx([0.8, 0.8, 0.5, 0.5, 0.5])
    others = replace(conversation(), policy="partner")
    teacher = Teacher()
    player, records = await make_player(teacher, workflow=Plays(conversation(), others))
    await played(player, make_order(indices=(0,), sampling=Sampling(temperature=0.8)))
    found, untouched = records.trajectories[0].sequences
    scores = await ScriptedEngine.score(teacher, asked)
    assert found.segments[1].teacher_logprobs.tolist() == scores[:2].tolist()
    assert found.segments[3].teacher_logprobs.tolist() == scores[2:].tolist()
    assert untouched is others
    for before, after in zip(conversation().segments, found.segments, strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist() and before.weight_version == after.weight_version


def test_tokens_from_a_part_of_the_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match="client_sampling"):
        score_request(conversation(kept=b"\x01"), 1.0, "r")
