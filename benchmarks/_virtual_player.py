"""Rollouts in virtual time, in one thread: the torch engine's core and the real ``tool_use`` workflow, with a
calculator.

    workflow coroutine --awaits--> a generation: the engine's core, one decoding step per tick
                       --awaits--> a tool call: answered after as many ticks as its latency says

A tick is one decoding step. No asyncio, no threads, no clock: the same seeds give the same tokens, log-probabilities,
versions and ticks. Weight updates come between two ticks, as in the engine's own thread. Independent of groups, batches
and training. Shared by the scripts of this folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Generator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import xxhash

from recipes.quickstart.reward import boxed_answer
from services.common.records import Sampling, Task, Trajectory
from services.common.text.chat import Chat, load_model
from services.common.weights.snapshot import named_weights
from services.inference.engine.base import Generation, GenerationRequest, KvPolicy, WeightUpdate
from services.inference.engine.torch.decoder import Decoder, prepare
from services.inference.engine.torch.engine import Core, Entry
from services.inference.engine.torch.slots import SlotTable
from services.inference.workflows.base import Execution, Outcome, ProgramStatus, Reward, Workflow, WorkflowContext

POLICY = "model0"

Latency = Callable[[Task, int], int]  # ticks of a tool call, from the task and the rollout's seed

_CALCULATION = re.compile(r"print\((0|[1-9]\d{0,8})([+*-])(0|[1-9]\d{0,8})\)")


def at_once(task: Task, seed: int) -> int:
    """The latency of a tool that answers within the tick."""
    return 0


@dataclass(frozen=True, slots=True)
class Slot:
    """One rollout that is to be played."""

    task_group_id: str
    index: int
    task: Task
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class _Generate:
    """Awaited by a workflow; gives the generation."""

    request: GenerationRequest

    def __await__(self) -> Generator[_Generate, Generation, Generation]:
        return (yield self)


@dataclass(frozen=True, slots=True)
class _Pause:
    """Awaited by a workflow; returns so many ticks later."""

    ticks: int

    def __await__(self) -> Generator[_Pause, None, None]:
        yield self


class _Policy:
    """The ``PolicyClient`` of one rollout: its requests have names and seeds of their own."""

    name = POLICY

    def __init__(self, slot: Slot, chat: Chat, context_length: int) -> None:
        self.chat = chat
        self.context_length = context_length
        self._slot = slot
        self._num_requests = 0

    async def generate(
        self, prompt_ids: Seq[int], sampling: Sampling, *, watch: Any = None, seed: int | None = None
    ) -> Generation:
        assert watch is None and seed is None, "tool_use asks for neither"
        name = f"{self._slot.task_group_id}/{self._slot.index}/{self._num_requests}"
        drawn = seed_of(self._slot.seed, str(self._num_requests))
        self._num_requests += 1
        return await _Generate(
            GenerationRequest(
                request_id=name,
                prompt_ids=tuple(prompt_ids),
                sampling=sampling,
                stop_token_ids=self.chat.stop_token_ids,
                seed=drawn,
            )
        )


class _Calculator:
    """The part of a ``Gateway`` that the quickstart asks for: programs that print one result, and the reward."""

    def __init__(self, slot: Slot, latency: Latency) -> None:
        self._slot = slot
        self._latency = latency

    async def execute_code(
        self, code: str, *, stdin: bytes = b"", print_trailing_expression: bool = False
    ) -> Execution:
        ticks = self._latency(self._slot.task, self._slot.seed)
        if ticks > 0:
            await _Pause(ticks)
        found = _CALCULATION.fullmatch(code)
        if found is None:
            return Execution(status=ProgramStatus.RUNTIME_ERROR, stderr="SyntaxError")
        left, operator, right = int(found[1]), found[2], int(found[3])
        value = {"+": left + right, "-": left - right, "*": left * right}[operator]
        return Execution(status=ProgramStatus.OK, stdout=f"{value}\n")

    async def compute_reward(self, reward: str, task: Task, completion: str) -> Reward:
        return Reward(value=boxed_answer(task.data, completion))


@dataclass(slots=True)
class _Rollout:
    slot: Slot
    coroutine: Coroutine[Any, Any, Outcome]
    began: int  # tick
    entry: Entry | None = None  # of the generation that it waits for


class VirtualPlayer:
    """Plays rollouts side by side; ``num_slots`` of them generate at once, the others wait for a slot."""

    def __init__(
        self,
        model_path: str,
        workflow: Workflow,
        chat: Chat,
        *,
        num_slots: int,
        context_length: int,
        latency: Latency = at_once,
    ) -> None:
        decoder = Decoder(load_model(model_path), num_slots=num_slots, context_length=context_length)
        self._core = Core(decoder, SlotTable(num_slots, context_length), kv_policy=KvPolicy.RECOMPUTE, version=0)
        self._workflow = workflow
        self._chat = chat
        self._context_length = context_length
        self._latency = latency
        self._playing: dict[tuple[str, int], _Rollout] = {}
        self._ready: list[tuple[_Rollout, Any]] = []  # what they waited for is there
        self._due: dict[int, list[_Rollout]] = {}  # tick -> rollouts whose tool answers then
        self._finished: list[Trajectory] = []
        self.now = 0  # ticks

    @property
    def num_playing(self) -> int:
        return len(self._playing)

    @property
    def version(self) -> int:
        return self._core.version

    def update(self, model: Any, version: int) -> None:
        """Take the weights of a trainer's causal language model, in place; live rollouts go on under them."""
        update = WeightUpdate.full(named_weights(model), version)
        self._core.update(prepare(update, self._core.decoder.weights))

    def start(self, slot: Slot) -> None:
        context = WorkflowContext(
            policies={POLICY: _Policy(slot, self._chat, self._context_length)},
            gateway=_Calculator(slot, self._latency),  # type: ignore[arg-type]
            sampling=slot.sampling,
            seed=slot.seed,
            episode_seed=seed_of(0, slot.task_group_id),  # the same for a whole group
        )
        rollout = _Rollout(slot, self._workflow.run(slot.task, context), self.now)
        self._playing[slot.task_group_id, slot.index] = rollout
        self._resume(rollout, None)

    def cancel(self, task_group_id: str, index: int) -> None:
        """End a rollout without a result. A rollout that is not played (any more) is ignored."""
        rollout = self._playing.pop((task_group_id, index), None)
        if rollout is None:
            return
        rollout.coroutine.close()
        if rollout.entry is not None:
            self._core.withdraw(rollout.entry)

    def tick(self) -> list[Trajectory]:
        """One decoding step; returns the rollouts that this step and the answered tools finish, in order."""
        if self._core.has_work:
            self._core.step()
        self.now += 1
        ready, self._ready = self._ready, []
        for rollout, answer in [*ready, *((r, None) for r in self._due.pop(self.now, []))]:
            if self._playing.get((rollout.slot.task_group_id, rollout.slot.index)) is rollout:
                self._resume(rollout, answer)
        finished, self._finished = self._finished, []
        return finished

    def play(self, slots: Seq[Slot]) -> list[Trajectory]:
        """All of them to their ends, in the order given."""
        for slot in slots:
            self.start(slot)
        found: dict[tuple[str, int], Trajectory] = {}
        while self._playing:
            found |= {(t.task_group_id, t.index): t for t in self.tick()}
        return [found[slot.task_group_id, slot.index] for slot in slots]

    def _resume(self, rollout: _Rollout, answer: Any) -> None:
        rollout.entry = None
        try:
            wanted = rollout.coroutine.send(answer)
        except StopIteration as ended:
            self._end(rollout, ended.value)
            return
        if isinstance(wanted, _Pause):
            self._due.setdefault(self.now + wanted.ticks, []).append(rollout)
            return
        assert isinstance(wanted, _Generate), f"a workflow awaited {wanted!r}, which has no place in virtual time"
        rollout.entry = Entry(request=wanted.request, done=lambda result: self._ready.append((rollout, result)))
        self._core.submit(rollout.entry)

    def _end(self, rollout: _Rollout, outcome: Outcome) -> None:
        slot = rollout.slot
        del self._playing[slot.task_group_id, slot.index]
        self._finished.append(
            Trajectory(
                task_group_id=slot.task_group_id,
                index=slot.index,
                sequences=outcome.sequences,
                reward=outcome.reward,
                metrics=outcome.metrics,
                started_at=float(rollout.began),
                finished_at=float(self.now),
            )
        )


def seed_of(seed: int, what: str) -> int:
    """A seed of its own for each use, 63 bits."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{what}".encode()) >> 1


def mean_reward(trajectories: Seq[Trajectory]) -> float:
    return sum(t.reward for t in trajectories) / len(trajectories)


def operator_of(data: Mapping[str, Any]) -> str:
    """``plus``, ``minus`` or ``times``: which kind of problem a row of the quickstart is."""
    return str(data["id"]).split("-")[1]
