"""Episodes against an environment: turns, rewards, budgets, and that the episode is always closed."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import EpisodeNotFoundError
from services.common.records import Purpose, StopReason, Task
from services.inference.workflows.base import Episode, Outcome, Step
from services.inference.workflows.single import AgentEnv, AgentEnvSettings
from tests.unit.inference.fakes import FakeGateway, make_context, make_task, qwen_like_chat, served_policy


class Corridor(FakeGateway):
    """Three steps ``go`` reach the end, each worth 0.25 and the last 0.5; ``sleep`` has no effect; ``fall`` costs 1."""

    def __init__(self, observation: str = "a corridor", fail_at: int = 0, roles: str = "") -> None:
        super().__init__()
        names = {"u": "user", "a": "assistant", "s": "system"}
        self.messages = tuple({"role": names[role], "content": f"turn {n}"} for n, role in enumerate(roles))
        self.observation = observation
        self.fail_at = fail_at
        self.actions: list[str] = []
        self.closed: list[str] = []

    async def create_episode(self, environment: str, task: Task, seed: int) -> Episode:
        return Episode(episode_id="e1", observation=f"{environment}: {self.observation}", messages=self.messages)

    async def step(self, episode_id: str, turn: int, action: str) -> Step:
        assert turn == len(self.actions) + 1
        if turn == self.fail_at:
            raise EpisodeNotFoundError("the episode is gone")
        self.actions.append(action)
        steps = self.actions.count("go")
        done = steps == 3
        reward = (0.5 if done else 0.25) if action == "go" else -1.0 if action == "fall" else 0.0
        return Step(observation=f"at {steps}", reward=reward, done=done, metrics={"steps": float(steps)})

    async def close(self, episode_id: str) -> None:
        self.closed.append(episode_id)


async def play(
    texts: list[str], gateway: Corridor, purpose: Purpose = Purpose.TRAIN, context_length: int = 2048, **settings: Any
) -> Outcome:
    import dataclasses

    policy = await served_policy(texts, context_length=context_length)
    context = dataclasses.replace(make_context(policy, gateway), purpose=purpose)
    return await AgentEnv(AgentEnvSettings(**{"environment": "corridor", **settings})).run(make_task(), context)


@pytest.mark.parametrize(
    ("texts", "settings", "reward", "total", "stop", "turns"),
    [
        (["go"], {}, 1.0, 1.0, StopReason.ENVIRONMENT, 3),
        (["go"], {"turn_discount": 0.5}, 0.125, 1.0, StopReason.ENVIRONMENT, 3),
        (["go"], {"max_turns": 2}, 0.5, 0.5, StopReason.TURN_LIMIT, 2),
        (["sleep"], {"max_turns": 2, "failure_penalty": -0.3}, -0.3, 0.0, StopReason.TURN_LIMIT, 2),
        (["sleep"], {"max_turns": 2, "failure_penalty": -0.3, "turn_discount": 0.5}, -0.3, 0.0, StopReason.TURN_LIMIT, 2),
        (["sleep", "go", "go", "go"], {}, 1.0, 1.0, StopReason.ENVIRONMENT, 4),
        (["sleep"], {"max_turns": 2}, 0.0, 0.0, StopReason.TURN_LIMIT, 2),
        (["fall"], {"max_turns": 2, "failure_penalty": -0.3}, -0.3, -2.0, StopReason.TURN_LIMIT, 2),
        (["go"], {"failure_penalty": -0.3, "failure_threshold": 1.0}, -0.3, 1.0, StopReason.ENVIRONMENT, 3),
    ],
)  # fmt: skip
async def test_discount_and_failure_penalty_shape_the_trained_reward_where_they_are_set(
    texts: list[str], settings: dict[str, Any], reward: float, total: float, stop: StopReason, turns: int
) -> None:
    gateway = Corridor()
    outcome = await play(texts, gateway, **settings)
    (sequence,) = outcome.sequences
    assert sequence.reward == pytest.approx(reward) and outcome.reward == pytest.approx(total)
    assert sequence.stop_reason is stop and sequence.metrics["turns"] == turns == len(gateway.actions)
    assert sequence.metrics["environment_steps"] == gateway.actions.count("go")
    assert gateway.closed == ["e1"]


@pytest.mark.parametrize("num_turns", [1, 7, 30])
async def test_a_negative_return_is_trained_as_it_is(num_turns: int) -> None:
    """Defect 5: without shaping settings the sequence's reward is the return, also where that is not positive."""
    outcome = await play(["fall"], Corridor(), max_turns=num_turns)
    assert outcome.sequences[0].reward == outcome.reward == -float(num_turns)
    assert outcome.sequences[0].metrics["return"] == -float(num_turns)


async def test_the_episode_is_one_sequence_whose_observations_are_not_trained() -> None:
    outcome = await play(["go"], Corridor())
    (sequence,) = outcome.sequences
    decode = qwen_like_chat().decode
    said = [decode(s.token_ids.tolist()) for s in sequence.segments if s.is_policy]
    read = "".join(decode(s.token_ids.tolist()) for s in sequence.segments if not s.is_policy)
    assert [text.removesuffix("<|im_end|>") for text in said] == ["go", "go", "go"]
    assert "corridor: a corridor" in read and "at 1" in read and "at 2" in read and "at 3" not in read


async def test_evaluation_may_have_turns_of_its_own() -> None:
    training = await play(["sleep"], Corridor(), max_turns=4, evaluation_max_turns=2)
    evaluation = await play(["sleep"], Corridor(), Purpose.EVALUATION, max_turns=4, evaluation_max_turns=2)
    assert [o.sequences[0].metrics["turns"] for o in (training, evaluation)] == [4, 2]


async def test_an_observation_that_does_not_fit_ends_the_episode_with_what_was_earned() -> None:
    gateway = Corridor()
    prompt = len(qwen_like_chat().prompt_ids([{"role": "user", "content": "corridor: a corridor"}]))
    outcome = await play(["go"], gateway, context_length=prompt + 8)
    assert outcome.sequences[0].stop_reason is StopReason.LENGTH
    assert outcome.reward == pytest.approx(0.25) and gateway.closed == ["e1"]


async def test_a_lost_episode_is_no_reward_and_is_closed() -> None:
    gateway = Corridor(fail_at=2)
    with pytest.raises(EpisodeNotFoundError):
        await play(["go"], gateway)
    assert gateway.closed == ["e1"]


async def test_the_instruction_stands_after_the_first_observation_and_the_system_turn_before() -> None:
    outcome = await play(["go"], Corridor(), instruction=" Act!", system="You are brave.")
    prompt = qwen_like_chat().decode(outcome.sequences[0].segments[0].token_ids.tolist())
    assert "You are brave." in prompt and "a corridor Act!" in prompt
    outcome = await play(["go"], Corridor(), instruction="Act!")
    assert "a corridor\n\nAct!" in qwen_like_chat().decode(outcome.sequences[0].segments[0].token_ids.tolist())


@pytest.mark.parametrize("settings", [{"max_turns": 2}, {"max_response_tokens": 20}])
async def test_an_environment_that_is_scored_at_its_end_is_scored_where_the_policy_has_not_ended_it(
    settings: dict[str, Any],
) -> None:
    class Tests(Corridor):
        """Scores at the first action that asks for nothing, as ``harbor`` does."""

        async def step(self, episode_id: str, turn: int, action: str) -> Step:
            taken = await super().step(episode_id, turn, action)
            return Step(observation="x" * 50, reward=0.0, done=False, metrics=taken.metrics) if action else Step(
                observation="", reward=0.75, done=True, metrics={"commands": 2.0}
            )  # fmt: skip

    gateway = Tests()
    outcome = await play(["sleep"], gateway, **{"environment": "harbor", **settings})
    (sequence,) = outcome.sequences
    assert gateway.actions.count("") == 1 and gateway.actions[-1] == ""
    assert outcome.reward == sequence.reward == 0.75
    assert sequence.metrics["environment_commands"] == 2.0
    assert sequence.stop_reason in (StopReason.TURN_LIMIT, StopReason.LENGTH)


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.EVALUATION])
async def test_an_opening_of_turns_is_a_chat_and_none_of_its_tokens_is_trained(purpose: Purpose) -> None:
    outcome = await play(["go"], Corridor(roles="uauau"), purpose, instruction="Act.", system="Be brief.")
    (sequence,) = outcome.sequences
    chat = qwen_like_chat()
    opening = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"turn {n}"} for n in range(5)]
    opening[-1]["content"] += "\n\nAct."
    first = sequence.segments[0]
    assert not first.is_policy
    assert tuple(first.token_ids) == chat.prompt_ids([{"role": "system", "content": "Be brief."}, *opening])
    assert [chat.decode(s.token_ids.tolist()) for s in sequence.segments if s.is_policy] == ["go"] * 3


@pytest.mark.parametrize("roles", ["auau", "uua", "ua", "aau", "uuu", "suau", "", "uau" * 2])
async def test_turns_in_an_order_that_a_template_may_refuse_are_one_user_message(roles: str) -> None:
    outcome = await play(["go"], Corridor(roles=roles))
    (sequence,) = outcome.sequences
    one = [{"role": "user", "content": "corridor: a corridor"}]
    assert tuple(sequence.segments[0].token_ids) == qwen_like_chat().prompt_ids(one)
