"""Built-in scripts: right in their share of the rollouts, wrong in the others, and their text can be parsed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

import rollmill
from services.common.config.data import WorkflowConfig
from services.common.config.loading import validate
from services.common.config.processes import ForcedEngineConfig
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, DatasetError
from services.common.records import Purpose, Sampling, Segment, Task
from services.common.telemetry.accounts import TimeAccount
from services.common.text.tools import find_call, parse_json_call
from services.inference.engine.base import FinishReason, Generation, GenerationRequest
from services.inference.rollouts import RolloutPolicy, ServedPolicy
from services.inference.workflows.base import (
    Episode,
    Execution,
    Outcome,
    ProgramStatus,
    ReviewVerdict,
    Step,
    WorkflowContext,
    boxed_integer,
    read_verdict,
)
from services.inference.workflows.registry import build_workflow
from services.inference.workflows.scripts import (
    Cue,
    EarlierTurn,
    Scene,
    load_scripts,
    solve_and_verify,
    speak,
)
from tests.unit.inference.fakes import FakeGateway, qwen_like_chat

MATH = {"problem": "What is 6 times 7?", "answer": "42"}
STDIN = {"problem": "Add.", "tests": {"kind": "stdin", "cases": [{"stdin": "1 2\n", "expected": "3\n"}]}}
EXPERT = ["go to shelf 1", "take mug 1 from shelf 1", "win"]


def recipe(workflow: WorkflowConfig, **sections: Any) -> Recipe:
    """The smallest recipe with a workflow."""
    policy = {"model": {"path": "somewhere"}, "trainer": {"port": 0}, "weights": {"port": 0}}
    tree = {
        "name": "test",
        "policies": {"model0": policy, "model1": policy},
        "data": {"train": {"path": "tasks.jsonl"}},
        "workflow": workflow.model_dump(),
        "evaluation": {"at_start": False, "at_end": False},
        **sections,
    }
    return validate(tree, source="test")


class Parrot:
    """An engine that emits the requests' ``forced_ids`` and records them."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        assert request.forced_ids is not None
        assert request.forced_ids[-1] in request.stop_token_ids
        self.texts.append(qwen_like_chat().decode(request.forced_ids))
        ids = request.forced_ids
        return Generation(segments=(Segment.policy(ids, [-1.0] * len(ids), 0),), finish_reason=FinishReason.STOP)


class World(FakeGateway):
    """A gateway with one episode, which ends with the expert's last action."""

    async def create_episode(self, environment: str, task: Task, seed: int) -> Episode:
        return Episode(
            episode_id="e", observation="A room. THOUGHT then ACTION: one of\nAVAILABLE ACTIONS: look, dance"
        )

    async def step(self, episode_id: str, turn: int, action: str) -> Step:
        won = action.endswith("ACTION: win")
        return Step(observation="AVAILABLE ACTIONS: look, dance", reward=float(won), done=won)

    async def execute_code(self, code: str, **_: Any) -> Execution:
        failed = "// 0" in code
        return Execution(status=ProgramStatus.RUNTIME_ERROR if failed else ProgramStatus.OK, stdout="42")


@dataclass
class Played:
    outcomes: list[Outcome] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [outcome.reward for outcome in self.outcomes]


async def play(name: str, row: Mapping[str, Any], count: int = 80, **settings: Any) -> Played:
    """``count`` rollouts of one task with seeds of their own."""
    config = WorkflowConfig(name=name, settings=settings)
    book = load_scripts(ForcedEngineConfig(), recipe(config))
    workflow = build_workflow(config)
    gateway = World(reward=lambda task, completion: boxed_integer(task.data, completion))
    played, task = Played(), Task(task_id="t", data=dict(row))
    for seed in range(count):
        engine, scene = Parrot(), Scene(task, Purpose.TRAIN, seed)
        policies = {
            policy: RolloutPolicy(
                ServedPolicy(
                    name=policy,
                    engine=engine,
                    chat=qwen_like_chat(),
                    context_length=8192,
                    script=book,  # type: ignore[arg-type]
                ),
                request_prefix=f"g/{seed}/0",
                seed=seed,
                account=TimeAccount("replica/a"),
                scene=scene,
            )
            for policy in ("model0", "model1")
        }
        context = WorkflowContext(
            policies=policies,
            gateway=gateway,
            sampling=Sampling(max_new_tokens=4096),
            seed=seed,
            episode_seed=0,
            purpose=Purpose.TRAIN,
        )
        played.outcomes.append(await workflow.run(task, context))
        played.texts.append(engine.texts)
    return played


def cue(
    row: Mapping[str, Any], seed: int = 0, said: tuple[EarlierTurn, ...] = (), workflow: str = "single_turn"
) -> Cue:
    book = load_scripts(ForcedEngineConfig(), recipe(WorkflowConfig(name=workflow)))
    return Cue(
        policy="model0", task=Task(task_id="t", data=row), purpose=Purpose.TRAIN, prompt="", said=said,
        settings=book.parts[Purpose.TRAIN].settings, right_share=0.5, num_words=8, seed=seed,
    )  # fmt: skip


def about_half(values: list[bool]) -> bool:
    """Five standard deviations around one half."""
    return abs(sum(values) / len(values) - 0.5) < 5 * 0.5 / len(values) ** 0.5


async def test_half_of_the_single_turns_are_right_and_the_others_differ() -> None:
    played = await play("single_turn", MATH, policy="model0", reward="math")
    assert set(played.rewards) == {0.0, 1.0}
    assert about_half([reward == 1.0 for reward in played.rewards])
    assert len({texts[0] for texts in played.texts}) > 70


def whole_text(task: Mapping[str, Any], completion: str) -> float:
    return float(completion == task["answer"])


@pytest.mark.parametrize("workflow", ["single_turn", "tool_use"])
async def test_an_answer_is_bare_for_a_reward_that_does_not_read_a_box(workflow: str) -> None:
    played = await play(workflow, MATH, policy="model0", reward=f"{__name__}:whole_text")
    assert set(played.rewards) == {0.0, 1.0}
    assert about_half([reward == 1.0 for reward in played.rewards])


async def test_verdicts_are_right_half_of_the_time_about_right_and_wrong_solutions() -> None:
    played = await play("actor_verifier", MATH, count=160)
    verdicts: dict[float, list[bool]] = {0.0: [], 1.0: []}
    for outcome, texts in zip(played.outcomes, played.texts, strict=True):
        solution, review = outcome.sequences[0], outcome.sequences[1]
        verdicts[solution.reward].append(review.reward == 1.0)
        assert (len(outcome.sequences) == 3) == (read_verdict(texts[1]) is ReviewVerdict.REJECT)
    assert about_half(verdicts[0.0])
    assert about_half(verdicts[1.0])
    second = [outcome.sequences[2].reward == 1.0 for outcome in played.outcomes if len(outcome.sequences) == 3]
    assert about_half(second)


@pytest.mark.parametrize("workflow", ["tool_use", "tool_math"])
async def test_a_tool_is_called_before_the_answer_and_sometimes_fails(workflow: str) -> None:
    played = await play(workflow, MATH, policy="model0")
    assert about_half([reward == 1.0 for reward in played.rewards])
    for texts in played.texts:
        call = find_call(texts[0])
        assert isinstance(call, str)
        assert parse_json_call(call).name == "python_code_with_standard_io"  # type: ignore[union-attr]
        assert find_call(texts[1]) is None
    failed = [outcome.sequences[0].metrics["tool_errors"] for outcome in played.outcomes]
    assert set(failed) == {0.0, 1.0}
    if workflow == "tool_math":
        assert all(outcome.sequences[0].metrics["format_penalty"] == 0 for outcome in played.outcomes)


@rollmill.tool
def convert(amount: float, unit: Literal["km", "miles"], digits: int, labels: list[str], note: str = "") -> str:
    """Convert a length."""
    return f"{amount:.{digits}f} {unit} {labels} {note}"


async def test_a_tool_that_runs_no_code_is_called_as_the_prompt_lists_it() -> None:
    played = await play("tool_use", MATH, policy="model0", tools=["tests.unit.inference.test_scripts:convert"])
    assert about_half([reward == 1.0 for reward in played.rewards])
    calls = [parse_json_call(find_call(texts[0])) for texts in played.texts]  # type: ignore[arg-type]
    assert {call.name for call in calls} == {"convert"}  # type: ignore[union-attr]
    right = {"amount": 1.5, "unit": "km", "digits": 1, "labels": []}
    given = [dict(call.arguments) for call in calls]  # type: ignore[union-attr]
    assert all(arguments in ({}, right) for arguments in given) and right in given and {} in given
    failed = [outcome.sequences[0].metrics["tool_errors"] for outcome in played.outcomes]
    assert failed == [float(not arguments) for arguments in given]


def test_an_agent_of_ones_own_with_tools_gets_a_call_by_any_script_of_tools_and_then_the_answer() -> None:
    schema = {"properties": {"a": {"type": "integer"}, "city": {"enum": ["Ulm"]}}, "required": ["a", "city"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    listed = f"<tools>\n{json.dumps(tool)}\n</tools>"
    config = WorkflowConfig(name="external_agent", settings={"agent": "tests.unit.inference.test_scripts:convert"})
    for script in (None, "external_agent", "tool_use", "tool_math", "verifiers"):
        book = load_scripts(ForcedEngineConfig(script=script), recipe(config))
        for row, right in ((MATH, r"\boxed{42}"), ({"problem": "p", "solution": "so"}, "so"), (STDIN, "```python")):
            scenes = [Scene(Task(task_id="t", data=dict(row)), Purpose.TRAIN, seed) for seed in range(20)]
            answers = [right in scene.text(book, "model0", "What?") for scene in scenes]
            assert any(answers) and (right == "```python" or not all(answers)), "no tools: it answers at once"
            for scene in scenes:
                call = find_call(scene.text(book, "model0", listed))
                assert isinstance(call, str)
                assert json.loads(call) == {"name": "look", "arguments": {"a": 1, "city": "Ulm"}}
                scene.said.append(EarlierTurn(policy="model0", text=call))
                assert find_call(scene.text(book, "model0", listed)) is None
        with pytest.raises(DatasetError, match="has no reference for a scripted policy"):
            Scene(Task(task_id="t", data={"problem": "p"}), Purpose.TRAIN, 0).text(book, "model0", listed)


async def test_an_episode_follows_the_expert_to_the_end_or_idles() -> None:
    played = await play("agent_env", {"index": 3, "expert": EXPERT}, policy="model0", max_turns=5)
    assert about_half([reward == 1.0 for reward in played.rewards])
    for reward, texts in zip(played.rewards, played.texts, strict=True):
        actions = [text.rpartition("ACTION: ")[2] for text in texts]
        assert actions == EXPERT if reward else set(actions) == {"look"}
        assert reward or len(set(texts)) == 1, "equal replies: task servers end that early"


@pytest.mark.parametrize("config", [{"script": "nothing"}, {"script": "services.inference.workflows.scripts:SCRIPT"}])
def test_scripts_that_do_not_exist_are_told(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"script|SCRIPT"):
        load_scripts(ForcedEngineConfig(**config), recipe(WorkflowConfig()))


def test_a_workflow_without_a_script_of_its_own_needs_one_by_name() -> None:
    workflow = WorkflowConfig(name="services.inference.workflows.single:SingleTurn")
    with pytest.raises(ConfigError, match=r"forced\.script"):
        load_scripts(ForcedEngineConfig(), recipe(workflow))
    book = load_scripts(ForcedEngineConfig(script="single_turn"), recipe(workflow))
    assert book.parts[Purpose.EVALUATION].script is speak


def test_evaluation_by_another_workflow_has_the_script_of_that_one() -> None:
    evaluated = {
        "at_start": False,
        "at_end": False,
        "workflow": {"name": "single_turn", "settings": {"policy": "model0"}},
    }
    book = load_scripts(ForcedEngineConfig(), recipe(WorkflowConfig(name="actor_verifier"), evaluation=evaluated))
    assert book.parts[Purpose.TRAIN].script is solve_and_verify
    assert book.parts[Purpose.EVALUATION].script is speak
    assert book.parts[Purpose.EVALUATION].settings.policy == "model0"


async def test_the_documented_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tiny.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (section,) = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    config = ForcedEngineConfig(**yaml.safe_load(section)["inference"]["a"]["forced"])
    (tmp_path / "my_scripts.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    book = load_scripts(config, recipe(WorkflowConfig()))
    monkeypatch.delitem(sys.modules, "my_scripts")
    said = [book.parts[Purpose.TRAIN].script(cue({"capital": "Paris"}, seed)) for seed in range(60)]
    assert about_half([text.endswith("Paris") for text in said])
    assert len(set(said)) == 60
