"""Stand-ins for everything a workflow touches: a Qwen-like tokenizer, a scripted policy, an in-process gateway."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.common.records import Purpose, RolloutFailure, Sampling, Task, TaskGroupOrder, Trajectory
from services.common.telemetry.accounts import TimeAccount
from services.common.text.chat import Chat
from services.inference.engine.base import Generation, GenerationRequest
from services.inference.engine.scripted import ScriptedEngine
from services.inference.rollouts import RolloutPlayer, RolloutPolicy, ServedPolicy
from services.inference.workflows.base import (
    CaseOutcome,
    Episode,
    Execution,
    JudgeCase,
    ProgramStatus,
    Reward,
    Step,
    WorkflowContext,
)

SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# The shape of Qwen's templates: a default system turn, tools listed in it, tool results as user turns (neighbours
# share one), and the thinking of earlier turns dropped.
TEMPLATE = """
{%- set first = messages[0] -%}
{{- '<|im_start|>system\\n' -}}
{{- first.content if first.role == 'system' else 'You are helpful.' -}}
{%- if tools -%}
{{- '\\n\\n<tools>' -}}{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}{{- '\\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{%- set text = message.content.split('</think>')[-1] if not loop.last else message.content -%}
{{- '<|im_start|>assistant\\n' + text + '<|im_end|>\\n' -}}
{%- elif message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# Qwen3's way to switch thinking off: the answer begins behind an empty thought.
THINKING_TEMPLATE = (
    TEMPLATE
    + "{%- if add_generation_prompt and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
)


@functools.cache
def qwen_like_tokenizer() -> Any:
    """A byte-level BPE trained here, with merges that cross line breaks, so that careless splitting would show."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    text = ["print(1 + 1)\n\n", "assistant\n", "user\n\nWhat is 12 times 34?\n", "the answer is \\boxed{42}.\n\n\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


@functools.cache
def qwen_like_chat() -> Chat:
    return Chat(qwen_like_tokenizer())


@functools.cache
def thinking_chat() -> Chat:
    """A chat with a template that has a switch for thinking."""
    tokenizer = copy.deepcopy(qwen_like_tokenizer())
    tokenizer.chat_template = THINKING_TEMPLATE
    return Chat(tokenizer)


Script = Callable[[GenerationRequest], Sequence[int]]


def replies(chat: Chat, texts: Sequence[str], *, end: bool = True) -> Script:
    """A script that says ``texts`` turn by turn, each with its end of turn unless ``end`` is off."""

    def script(request: GenerationRequest) -> Sequence[int]:
        turn = int(request.request_id.rsplit("/", 1)[1])
        return [*chat.encode(texts[min(turn, len(texts) - 1)]), *([chat.end_of_turn_id] if end else [])]

    return script


class RecordingEngine(ScriptedEngine):
    """Records requests and answers."""

    def __init__(self, script: Script, **settings: Any) -> None:
        super().__init__(script, **settings)
        self.requests: list[GenerationRequest] = []
        self.generations: list[Generation] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        generation = await super().generate(request)
        self.generations.append(generation)
        return generation


async def served_policy(
    script: Script | Sequence[str], *, chat: Chat | None = None, context_length: int = 2048, **settings: Any
) -> ServedPolicy:
    """A policy with a script's text, on a started engine."""
    chat = chat or qwen_like_chat()
    engine = RecordingEngine(
        script if callable(script) else replies(chat, script), context_length=context_length, **settings
    )
    await engine.start()
    return ServedPolicy(name="model0", engine=engine, chat=chat, context_length=context_length)


def passes_all(code: str, case: JudgeCase) -> CaseOutcome:
    return CaseOutcome(verdict=ProgramStatus.OK)


class FakeGateway:
    """Runs ``python`` as a table of programs; counts calls; fails as often as told."""

    def __init__(
        self,
        programs: Mapping[str, Execution] | None = None,
        reward: Callable[[Task, str], float] = lambda task, completion: 1.0,
        failures: Sequence[Exception] = (),
        on_case: Callable[[str, JudgeCase], CaseOutcome] = passes_all,
    ) -> None:
        self.programs = programs or {}
        self.reward = reward
        self.failures = list(failures)
        self.executed: list[tuple[str, bytes, bool]] = []
        self.graded: list[tuple[str, str]] = []
        self.on_case = on_case
        self.judged: list[tuple[str, tuple[JudgeCase, ...], str]] = []  # program, cases, entry point

    async def execute_code(
        self, code: str, *, stdin: bytes = b"", print_trailing_expression: bool = False
    ) -> Execution:
        await asyncio.sleep(0)
        self._maybe_fail()
        self.executed.append((code, stdin, print_trailing_expression))
        return self.programs.get(code, Execution(status=ProgramStatus.OK, stdout=f"ran {code}\n"))

    async def compute_reward(self, reward: str, task: Task, completion: str) -> Reward:
        self._maybe_fail()
        self.graded.append((reward, completion))
        return Reward(value=self.reward(task, completion))

    async def judge(
        self, code: str, cases: Sequence[JudgeCase], *, entry_point: str = "", case_time_s: float = 6.0
    ) -> tuple[CaseOutcome, ...]:
        self._maybe_fail()
        self.judged.append((code, tuple(cases), entry_point))
        return tuple(self.on_case(code, case) for case in cases)

    async def create_episode(self, environment: str, task: Task, seed: int) -> Episode:
        return Episode(episode_id="episode-1", observation=f"{environment} begins")

    async def step(self, episode_id: str, turn: int, action: str) -> Step:
        return Step(observation=f"saw {action}", reward=float(action == "win"), done=action == "win")

    async def close(self, episode_id: str) -> None:
        return None

    def _maybe_fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


class Records:
    """A sink that keeps its records."""

    def __init__(self) -> None:
        self.all: list[Trajectory | RolloutFailure] = []

    async def send(self, record: Trajectory | RolloutFailure) -> None:
        self.all.append(record)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [r for r in self.all if isinstance(r, Trajectory)]

    @property
    def failures(self) -> list[RolloutFailure]:
        return [r for r in self.all if isinstance(r, RolloutFailure)]


def make_task(**data: Any) -> Task:
    return Task(task_id="t0", data={"question": "What is 6 times 7?", "answer": "42", **data})


def make_order(group: str = "g0", indices: Sequence[int] = (0, 1, 2, 3), **changes: Any) -> TaskGroupOrder:
    settings: dict[str, Any] = {
        "task_group_id": group,
        "task": make_task(),
        "indices": tuple(indices),
        "purpose": Purpose.TRAIN,
        "sampling": Sampling(max_new_tokens=200),
        "timeout_s": 20.0,
    }
    return TaskGroupOrder(**(settings | changes))


async def played(player: RolloutPlayer, order: TaskGroupOrder) -> None:
    """Play an order until nothing runs."""
    player.play(order)
    await player.wait_until_idle()


def make_context(policy: ServedPolicy, gateway: FakeGateway, **sampling: Any) -> WorkflowContext:
    client = RolloutPolicy(policy, request_prefix="g0/0/0", seed=1, account=TimeAccount("replica/a"))
    return WorkflowContext(
        policies={policy.name: client},
        gateway=gateway,
        sampling=Sampling(**{"max_new_tokens": 200, **sampling}),
        seed=1,
        episode_seed=2,
    )
