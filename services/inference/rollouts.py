"""Plays task groups: one asyncio task per slot, each ending in a trajectory, a failure, or no record if cancelled.

    order -> slots not known yet -> wait for a free slot -> attempts -> record -> sink

Repeating an order is harmless: a slot that is played, or whose record was handed to the sink, is not played again.
The exceptions are cancelled slots and those refused as WEIGHTS_STALE: the dispatcher issues them again.
A failure is data and never a reward. Independent of gRPC.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import structlog

from services.common.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    EpisodeNotFoundError,
    InfrastructureError,
    RollmillError,
    RolloutTimeoutError,
    WeightsStaleError,
    derived_seed,
    slot_seed,
)
from services.common.importing import RAISED, name_and_text, place_of, place_of_error
from services.common.records import (
    NO_TIMING,
    PhaseKind,
    PlayedBy,
    Purpose,
    RolloutFailure,
    RolloutPhase,
    RolloutTiming,
    Sampling,
    Segment,
    TaskGroupOrder,
    TokenSequence,
    Trajectory,
    part_for,
)
from services.common.system.threads import EndedByCodeError
from services.common.telemetry.accounts import ORCHESTRATOR, ActivityName, TimeAccount, replica
from services.common.telemetry.accounts import engine as engine_component
from services.common.telemetry.logs import LogEvent
from services.common.text.chat import Chat
from services.inference.engine.base import Engine, Generation, GenerationRequest, ScoreRequest, Watch
from services.inference.workflows.base import Endpoint, Gateway, Outcome, Workflow, WorkflowContext
from services.inference.workflows.scripts import EarlierTurn, Scene, ScriptBook

# --- Records the phases of one rollout for its record; costs a few microseconds per phase.


MAX_PHASES = 512  # of one rollout; one last phase counts the phases beyond
MAX_DETAIL = 120  # characters


@dataclass(slots=True)
class OpenPhase:
    """A phase of a rollout: the body of a ``with``, which may set detail and segments."""

    detail: str = ""
    segments: tuple[Segment, ...] = ()  # that were generated


class RolloutClock:
    """The phases of one rollout, timed from construction on; phases may overlap."""

    def __init__(self, accepted_at: float = 0.0) -> None:
        """``accepted_at``: when the order came, in seconds since the epoch."""
        self.started_at = time.time()
        self.num_retries = 0
        self._open: dict[PhaseKind, int] = {}  # phases by kind
        self._cut_short: dict[PhaseKind, float] = {}  # when a cancellation last ended one, as time.monotonic
        self._accepted_at = accepted_at
        self._zero = time.perf_counter()
        self._phases: list[RolloutPhase] = []
        self._num_left_out = 0
        self._left_out_from = math.inf

    def waited_for(self, since: float) -> set[PhaseKind]:
        """Kinds of phases that a cancellation has cut short since then (time.monotonic), or is about to."""
        return {what for what, at in self._cut_short.items() if at >= since} | {w for w, n in self._open.items() if n}

    @contextmanager
    def phase(self, what: PhaseKind, policy: str = "") -> Iterator[OpenPhase]:
        """Record the body as a phase, also when it raises."""
        phase = OpenPhase()
        self._open[what] = self._open.get(what, 0) + 1
        begin_s = time.perf_counter() - self._zero
        try:
            yield phase
        except BaseException as error:
            phase.detail = error.reason if isinstance(error, RollmillError) else type(error).__name__
            if isinstance(error, asyncio.CancelledError):
                self._cut_short[what] = time.monotonic()
            raise
        finally:
            self._open[what] -= 1
            if len(self._phases) < MAX_PHASES:
                versions = [segment.weight_version for segment in phase.segments if segment.num_tokens]
                self._phases.append(
                    RolloutPhase(
                        what=what,
                        begin_s=begin_s,
                        seconds=time.perf_counter() - self._zero - begin_s,
                        policy=policy,
                        num_tokens=sum(segment.num_tokens for segment in phase.segments),
                        first_version=min(versions, default=-1),
                        last_version=max(versions, default=-1),
                        detail=phase.detail[:MAX_DETAIL],
                    )
                )
            else:
                self._num_left_out += 1
                self._left_out_from = min(self._left_out_from, begin_s)

    def timing(self) -> RolloutTiming:
        """The phases recorded so far, in order of beginning."""
        phases = sorted(self._phases, key=attrgetter("begin_s"))
        if self._num_left_out:
            begin_s, detail = self._left_out_from, f"{self._num_left_out} more phases"
            seconds = time.perf_counter() - self._zero - begin_s
            phases.append(RolloutPhase(what=PhaseKind.NOT_RECORDED, begin_s=begin_s, seconds=seconds, detail=detail))
        return RolloutTiming(accepted_at=self._accepted_at, num_retries=self.num_retries, phases=tuple(phases))


_CLOCK: ContextVar[RolloutClock | None] = ContextVar("clock", default=None)


def phase_here(what: PhaseKind) -> AbstractContextManager[OpenPhase]:
    """A phase of the rollout that this task plays; recorded nowhere outside of a rollout."""
    return (_CLOCK.get() or RolloutClock()).phase(what)


# --- A replica's served policies, and the policy object that one rollout uses.


_SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """A policy with its engine and its tokenizer."""

    name: str
    engine: Engine
    chat: Chat
    context_length: int
    script: ScriptBook | None = None  # chooses the tokens of a replay engine, in training and in evaluation


class RolloutPolicy:
    """Names and seeds the requests of one rollout: equal rollouts draw equal numbers under any other load.

    ``scene`` describes the rollout to scripts; only a policy with a script uses the scene.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        *,
        request_prefix: str,
        seed: int,
        account: TimeAccount,
        scene: Scene | None = None,
        clock: RolloutClock | None = None,
        purpose: Purpose = Purpose.TRAIN,
    ) -> None:
        self._policy = policy
        self.name = policy.name
        self.chat = policy.chat
        self.context_length = policy.context_length
        self._request_prefix = request_prefix
        self._seed = seed
        self._account = account
        self._lane = account.here()  # an external agent calls from another task
        self._scene = scene
        self._clock = clock or RolloutClock()
        self._record_kept = purpose is Purpose.TRAIN
        self._num_requests = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, watch: Watch | None = None, seed: int | None = None
    ) -> Generation:
        number = self._num_requests
        self._num_requests += 1
        forced_ids = None
        if self._policy.script is not None and self._scene is not None:
            forced_ids = self._scene.forced_ids(self._policy.script, self.name, self.chat, prompt_ids)
        request = GenerationRequest(
            request_id=f"{self._request_prefix}/{self.name}/{number}",
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            stop_token_ids=self.chat.stop_token_ids,
            seed=(self._seed + number if seed is None else seed) & _SEED_MASK,
            forced_ids=forced_ids,
            record_kept=self._record_kept,
            watch=watch,
        )
        with (
            self._account.during(ActivityName.GENERATING, on=engine_component(self.name), lane=self._lane),
            self._clock.phase(PhaseKind.GENERATE, self.name) as phase,
        ):
            generation = await self._policy.engine.generate(request)
            phase.segments, phase.detail = generation.segments, generation.finish_reason.value
        if forced_ids is not None and self._scene is not None:
            said = [token for segment in generation.segments for token in segment.token_ids.tolist()]
            self._scene.said.append(EarlierTurn(policy=self.name, text=self.chat.decode(said)))
        return generation


# --- Scores of a teacher: log-probabilities of the tokens that a student sampled.


def score_request(sequence: TokenSequence, temperature: float, request_id: str) -> ScoreRequest:
    """A request to score every policy token of the sequence; ``temperature`` applies where a segment names none."""
    segments = sequence.segments
    if any(segment.kept for segment in segments):
        raise ConfigError(
            f"tokens of {sequence.policy} were drawn from a part of the vocabulary, and its teacher scores over the whole: "
            "sample with top_p 1, top_k 0, min_p 0 and min_new_tokens 0 (workflow.settings.client_sampling false), or name "
            "the teacher's model in algorithm.distillation.teacher_model"
        )
    lengths = [segment.num_tokens for segment in segments]
    is_policy = np.repeat([segment.is_policy for segment in segments], lengths)
    own = [temperature if segment.temperature is None else segment.temperature for segment in segments]
    return ScoreRequest(
        request_id=request_id,
        token_ids=sequence.token_ids,
        positions=np.flatnonzero(is_policy).astype(np.int64),
        temperatures=np.repeat(np.asarray(own, dtype=np.float32), lengths)[is_policy],
    )


# --- Plays the slots of orders: limits of time, retries of infrastructure failures, required versions, records.


log = structlog.get_logger(__name__)
SlotKey = tuple[str, int]  # (task group, index)
Record = Trajectory | RolloutFailure
_Slot = Coroutine[Any, Any, None]
_RETRYABLE = (InfrastructureError, EpisodeNotFoundError, CapacityError, DeadlineError)
_RETRY_BASE_S = 0.2
_CLOCK_TICK_S = 0.01  # a loop's timer may fire that much early
_REMEMBERED_SLOTS = 65536


class RecordSink(Protocol):
    """Takes a finished record; waits while too many are not yet durable."""

    async def send(self, record: Record) -> None: ...


@dataclass(slots=True)
class RolloutCounters:
    """Counters since the start of the process."""

    trajectories: int = 0
    failures: int = 0
    cancelled: int = 0
    repeated: int = 0
    retries: int = 0  # attempts after a first one


class RolloutPlayer:
    """Plays ``num_slots`` rollouts at once; further ordered rollouts wait here for a slot."""

    def __init__(
        self,
        *,
        workflows: Mapping[PlayedBy, Workflow],
        policies: Mapping[str, ServedPolicy],
        gateway: Gateway,
        sink: RecordSink,
        replica_id: str,
        num_slots: int,
        infra_retries: int,
        account: TimeAccount | None = None,
        endpoint: Endpoint | None = None,
        teachers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``teachers``: student policy -> the policy that scores the student's training tokens. Students that this replica
        does not serve are left out."""
        self.num_slots = num_slots
        self.counters = RolloutCounters()
        self._workflows = workflows
        self._policies = policies
        self._gateway = gateway
        self._sink = sink
        self._replica_id = replica_id
        self._infra_retries = infra_retries
        self._account = account or TimeAccount(replica(replica_id), num_lanes=num_slots)
        self._endpoint = endpoint
        self._teachers = {student: policies[name] for student, name in teachers.items() if student in policies}
        self._teacher_names = {teacher.name for teacher in self._teachers.values()}
        self._slots = asyncio.Semaphore(num_slots)
        self._groups: dict[str, dict[int, asyncio.Task[None]]] = {}  # running rollouts
        self._tasks: set[asyncio.Task[None]] = set()  # running rollouts, and cancelled ones in their cleanup
        self._finished: OrderedDict[SlotKey, None] = OrderedDict()  # recorded lately, oldest first
        self._limits: dict[asyncio.Timeout, float] = {}  # of the running rollouts; what is left while they stand still
        self._stands_still = False
        self._idle = asyncio.Event()
        self._idle.set()

    # -- commands -----------------------------------------------------------------------------------------------

    def play(self, order: TaskGroupOrder) -> int:
        """Start the slots of an order that are new here; returns their number."""
        return self._start(order.task_group_id, order.indices, partial(self._slot, order, time.time()))

    def refuse(self, task_group_id: str, indices: Iterable[int], error: RollmillError) -> None:
        """Fail the slots of an order that this replica cannot play."""

        async def fail(index: int) -> None:
            await self._hand_over(self._failure(task_group_id, index, error.reason, error.message))

        self._start(task_group_id, indices, fail)

    def cancel(self, task_group_id: str) -> int:
        """Cancel the rollouts of a task group and forget the group; returns the number of cancelled rollouts."""
        tasks = self._groups.pop(task_group_id, {}).values()
        for task in tasks:
            task.cancel()
        self.counters.cancelled += len(tasks)
        return len(tasks)

    def stand_still(self) -> None:
        """Stop the clocks of all rollouts: no engine can compute."""
        self._stands_still = True
        for limit in self._limits:
            self._stop(limit)

    def go_on(self) -> None:
        """Let the clocks of all rollouts run again."""
        self._stands_still = False
        now = asyncio.get_running_loop().time()
        for limit, left_s in self._limits.items():
            if not limit.expired():
                limit.reschedule(now + left_s)

    def _stop(self, limit: asyncio.Timeout) -> None:
        when = limit.when()
        if when is not None and not limit.expired():
            self._limits[limit] = when - asyncio.get_running_loop().time()
            limit.reschedule(None)

    async def close(self) -> None:
        """Cancel all rollouts and wait until they end."""
        for task_group_id in list(self._groups):
            self.cancel(task_group_id)
        await self._idle.wait()  # ends: every task is cancelled, and cleanup does not wait

    async def wait_until_idle(self) -> None:
        """Return when no rollout runs or waits for a slot; each rollout has its own time limit."""
        await self._idle.wait()

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return sum(len(group) for group in self._groups.values())

    @property
    def num_free_slots(self) -> int:
        return max(0, self.num_slots - self.num_running)

    @property
    def running_task_group_ids(self) -> tuple[str, ...]:
        return tuple(self._groups)

    # -- one slot -----------------------------------------------------------------------------------------------

    def _start(self, task_group_id: str, indices: Iterable[int], play: Callable[[int], _Slot]) -> int:
        playing = self._groups.setdefault(task_group_id, {})
        started = 0
        for index in indices:
            if index in playing or (task_group_id, index) in self._finished:
                self.counters.repeated += 1
                continue
            task = asyncio.create_task(play(index), name=f"rollout {task_group_id}/{index}")
            playing[index] = task
            self._tasks.add(task)
            # Not a `finally` in the task: one that is cancelled before its first step never enters its body.
            task.add_done_callback(partial(self._leave, task_group_id, index))
            started += 1
        if self._tasks:
            self._idle.clear()
        if not playing:
            del self._groups[task_group_id]
        return started

    async def _slot(self, order: TaskGroupOrder, accepted_at: float, index: int) -> None:
        async with self._slots:
            with self._account.lane(ActivityName.RUNNING_WORKFLOW):
                clock = RolloutClock(accepted_at)
                _CLOCK.set(clock)
                record = await self._record(order, index, clock)
                if record is not None:
                    await self._hand_over(record)

    async def _hand_over(self, record: Record) -> None:
        with self._account.during(ActivityName.WAITING_FOR_ROOM_TO_SEND, on=ORCHESTRATOR):
            await self._sink.send(record)
        if isinstance(record, Trajectory):
            self.counters.trajectories += 1
        else:
            self.counters.failures += 1
            if record.reason == WeightsStaleError.reason:
                return
        self._finished[record.task_group_id, record.index] = None
        if len(self._finished) > _REMEMBERED_SLOTS:
            self._finished.popitem(last=False)

    async def _record(self, order: TaskGroupOrder, index: int, clock: RolloutClock) -> Record | None:
        """The trajectory or the failure of a slot; None when an engine died and the process is about to end."""
        try:
            outcome = await self._outcome(order, index, clock)
        except RollmillError as error:
            if not self._is_healthy():
                return None  # no record: another replica plays the slot after this process has left
            return self._failure(order.task_group_id, index, error.reason, error.message, clock)
        except BaseException as error:  # a bug in a workflow, tool or reward of the user: this slot fails, others go on
            playing = self._groups.get(order.task_group_id, {}).get(index)
            if isinstance(error, asyncio.CancelledError) and playing is not asyncio.current_task():
                raise  # `cancel` asked for it; one that the user's code raises, as cancel scopes do, is a failure
            own = error.__cause__ if isinstance(error, EndedByCodeError) and error.__cause__ else error
            name, text = name_and_text(own)
            try:
                log.exception(LogEvent.ROLLOUT_CRASHED, task_group=order.task_group_id, index=index)
            except RAISED:  # the traceback asks the error for its name and text
                log.error(LogEvent.ROLLOUT_CRASHED, task_group=order.task_group_id, index=index, error=name)
            return self._failure(order.task_group_id, index, name, f"{place_of_error(own)}{text}", clock)
        return Trajectory(
            task_group_id=order.task_group_id,
            index=index,
            sequences=outcome.sequences,
            reward=outcome.reward,
            metrics=outcome.metrics,
            started_at=clock.started_at,
            finished_at=time.time(),
            replica_id=self._replica_id,
            timing=clock.timing(),
        )

    def _failure(
        self, task_group_id: str, index: int, reason: str, detail: str, clock: RolloutClock | None = None
    ) -> RolloutFailure:
        """A failure record; ``clock`` is the rollout's, if the rollout began."""
        log.warning(LogEvent.ROLLOUT_FAILED, task_group=task_group_id, index=index, reason=reason, detail=detail)
        return RolloutFailure(
            task_group_id=task_group_id,
            index=index,
            reason=reason,
            detail=detail,
            replica_id=self._replica_id,
            started_at=clock.started_at if clock else 0.0,
            finished_at=time.time(),
            timing=clock.timing() if clock else NO_TIMING,
        )

    async def _outcome(self, order: TaskGroupOrder, index: int, clock: RolloutClock) -> Outcome:
        """The outcome of one slot of an order, within its time, after retries of infrastructure failures.

        Raises:
            RolloutTimeoutError: the policy was too slow.
            DeadlineError: the time limit passed, and the rollout waited for more than the policy.
            RollmillError: the last attempt failed, or a policy moved on from a required version.
            Exception: any error that a workflow, tool or reward of the user raises.
        """
        limit = asyncio.timeout(order.timeout_s)
        try:
            async with limit:
                self._limits[limit] = order.timeout_s
                if self._stands_still:
                    self._stop(limit)
                while True:
                    try:
                        return await self._attempt(order, index, clock)
                    except _RETRYABLE as error:
                        # No retry for a failure in the cleanup after the time limit: the limit would not end the retry.
                        if clock.num_retries == self._infra_retries or limit.expired():
                            raise
                        attempt = clock.num_retries
                        self.counters.retries += 1
                        clock.num_retries += 1
                        about = {"task_group": order.task_group_id, "index": index, "attempt": attempt}
                        log.warning(LogEvent.ROLLOUT_RETRY, **about, error=str(error))
                        with (
                            self._account.during(ActivityName.PAUSING_BEFORE_RETRY) as wait,
                            clock.phase(PhaseKind.RETRY) as phase,
                        ):
                            wait.note(error.message)
                            phase.detail = error.reason
                            await asyncio.sleep(_RETRY_BASE_S * 2**attempt * (0.5 + random.random()))
        except TimeoutError:
            if not limit.expired():
                raise
            late = (
                f"rollout {order.task_group_id}/{index} was not done within {order.timeout_s:g} s (rollout.timeout_s)"
            )
            # Code of a workflow, a reward or an agent may wait for anything: such waits do not count against the policy.
            waits = clock.waited_for((limit.when() or 0.0) - _CLOCK_TICK_S)
            if waits == {PhaseKind.GENERATE} and clock.num_retries == 0 and self._is_healthy():
                raise RolloutTimeoutError(late) from None
            named = ", ".join(sorted(waits)) or "its own code"
            raise DeadlineError(
                f"{late}, after {clock.num_retries} retries and while the rollout waited for {named}"
            ) from None
        finally:
            self._limits.pop(limit, None)

    def _is_healthy(self) -> bool:
        return all(policy.engine.health().ok for policy in self._policies.values())

    async def _attempt(self, order: TaskGroupOrder, index: int, clock: RolloutClock) -> Outcome:
        for name, number in order.required_versions.items():
            required = self._policies.get(name)
            if required is None or required.engine.version != number:
                held = "not served here" if required is None else f"at version {required.engine.version}"
                raise WeightsStaleError(f"policy {name} must be at version {number} and is {held}")
        prefix = f"{order.task_group_id}/{index}/{clock.num_retries}"
        # Another attempt has the same seeds: new draws would select against samples on which infrastructure fails.
        seed = slot_seed(order.seed, index)
        scene = Scene(order.task, order.purpose, seed, order.source)
        policies = {
            name: RolloutPolicy(
                policy,
                request_prefix=prefix,
                seed=derived_seed(seed, name),  # two policies of a rollout draw independently
                account=self._account,
                scene=scene,
                clock=clock,
                purpose=order.purpose,
            )
            for name, policy in self._policies.items()
            # A teacher plays only in orders that name it.
            if (name in order.policies if order.policies else name not in self._teacher_names)
        }
        context = WorkflowContext(
            policies=policies,
            gateway=self._gateway,
            sampling=order.sampling,
            seed=seed,
            episode_seed=order.seed,
            purpose=order.purpose,
            endpoint=self._endpoint,
        )
        workflow = part_for(self._workflows, order.purpose, order.source)
        # A copy: code of the user may change its row.
        outcome = await workflow.run(replace(order.task, data=deepcopy(order.task.data)), context)
        if not isinstance(outcome, Outcome):
            said = f"{type(workflow).__name__}.run returned {type(outcome).__name__}, and no Outcome"
            raise TypeError(f"{place_of(workflow.run)}{said}: write `return chat.outcome(reward)`")
        if not outcome.sequences:
            raise ValueError("the workflow returned no sequence")
        for value in (outcome.reward, *(sequence.reward for sequence in outcome.sequences)):
            if not math.isfinite(value):
                raise ValueError(f"the workflow returned the reward {value}; must be a finite number")
        for sequence in outcome.sequences if order.required_versions else ():
            wanted = order.required_versions.get(sequence.policy)
            for segment in sequence.segments:
                if wanted is not None and segment.is_policy and segment.weight_version != wanted:
                    moved = f"moved to version {segment.weight_version} during an evaluation of {wanted}"
                    raise WeightsStaleError(f"policy {sequence.policy} {moved}")
        if not self._teachers or order.purpose is not Purpose.TRAIN:
            return outcome
        scored = [
            await self._scored(sequence, order.sampling, clock, f"{prefix}/score/{number}")
            for number, sequence in enumerate(outcome.sequences)
        ]
        return replace(outcome, sequences=tuple(scored))

    async def _scored(
        self, sequence: TokenSequence, sampling: Sampling, clock: RolloutClock, request_id: str
    ) -> TokenSequence:
        """The sequence with the log-probabilities of its policy's teacher, if there is one; ``sampling`` is the order's.

        Raises:
            ConfigError: tokens were drawn from a part of the vocabulary, over which no engine scores.
            InfrastructureError: the teacher's engine failed.
        """
        teacher = self._teachers.get(sequence.policy)
        if teacher is None or not sequence.num_trained_tokens:
            return sequence
        request = score_request(sequence, sampling.temperature, request_id)
        with (
            self._account.during(ActivityName.SCORING, on=engine_component(teacher.name)),
            clock.phase(PhaseKind.SCORE, teacher.name) as phase,
        ):
            logprobs = await teacher.engine.score(request)
            phase.detail = f"{len(logprobs)} tokens of {sequence.policy}"
        segments: list[Segment] = []
        start = 0
        for segment in sequence.segments:
            if segment.is_policy:
                end = start + segment.num_tokens
                segment = replace(segment, teacher_logprobs=logprobs[start:end])
                start = end
            segments.append(segment)
        return replace(sequence, segments=tuple(segments))

    def _leave(self, task_group_id: str, index: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        playing = self._groups.get(task_group_id)
        if playing is not None and playing.get(index) is task:  # else: cancelled, and perhaps ordered again
            del playing[index]
            if not playing:
                del self._groups[task_group_id]
        if not self._tasks:
            self._idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(LogEvent.ROLLOUT_LOST, task_group=task_group_id, index=index, exc_info=error)
