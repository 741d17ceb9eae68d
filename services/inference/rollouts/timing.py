"""Records the phases of one rollout for its record; costs a few microseconds per phase.

The times decide no outcome. The phases that a timeout cuts short tell a slow policy from slow infrastructure.

``TimedGateway`` and ``RolloutPolicy`` write into the clock of their rollout; workflows do not use the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType

from services.common.errors import RollmillError
from services.common.records.phases import PhaseKind
from services.common.records.types import NO_TIMING, RolloutPhase, RolloutTiming, Segment, Task
from services.inference.workflows.base import CaseOutcome, Episode, Execution, Gateway, JudgeCase, Reward, Step

MAX_PHASES = 512  # of one rollout; one last phase counts the phases beyond
MAX_DETAIL = 120  # characters


class OpenPhase:
    """A phase of a rollout: the body of its ``with``, also when that raises. The body may set detail and segments."""

    __slots__ = ("_begin", "_clock", "detail", "policy", "segments", "what")

    def __init__(self, clock: RolloutClock, what: PhaseKind, policy: str) -> None:
        self._clock = clock
        self._begin = 0.0
        self.what = what
        self.policy = policy
        self.detail = ""
        self.segments: tuple[Segment, ...] = ()  # that were generated

    def __enter__(self) -> OpenPhase:
        self._begin = self._clock.opened(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.detail = error.reason if isinstance(error, RollmillError) else type(error).__name__
        self._clock.closed(self, self._begin, cut_short=isinstance(error, asyncio.CancelledError))


class RolloutClock:
    """The phases of one rollout, timed from construction on; phases may overlap."""

    def __init__(self, accepted_at: float = 0.0, *, enabled: bool = True) -> None:
        """``accepted_at``: when the order came, in seconds since the epoch. ``enabled`` false: no phase is recorded."""
        self.started_at = time.time()
        self.num_retries = 0
        self._open: dict[PhaseKind, int] = {}  # phases by kind
        self._cut_short: dict[
            PhaseKind, float
        ] = {}  # kind of phase -> when a cancellation last ended one, as time.monotonic
        self._accepted_at = accepted_at
        self._enabled = enabled
        self._zero = time.perf_counter()
        self._phases: list[RolloutPhase] = []
        self._left_out: RolloutPhase | None = None
        self._num_left_out = 0

    def waited_for(self, since: float) -> set[PhaseKind]:
        """Kinds of phases that a cancellation has cut short since then (time.monotonic), or is about to."""
        return {what for what, at in self._cut_short.items() if at >= since} | {w for w, n in self._open.items() if n}

    def phase(self, what: PhaseKind, policy: str = "") -> OpenPhase:
        """A context manager that records its body as a phase, also when the body raises."""
        return OpenPhase(self, what, policy)

    def opened(self, phase: OpenPhase) -> float:
        """For ``OpenPhase``: note that a phase begins; returns the time in seconds of this clock."""
        self._open[phase.what] = self._open.get(phase.what, 0) + 1
        return time.perf_counter() - self._zero

    def closed(self, phase: OpenPhase, begin_s: float, *, cut_short: bool) -> None:
        """For ``OpenPhase``: note that a phase ends, ``cut_short`` by a cancellation or not."""
        self._open[phase.what] -= 1
        if cut_short:
            self._cut_short[phase.what] = time.monotonic()
        if self._enabled:
            self._keep(phase, begin_s, time.perf_counter() - self._zero - begin_s)

    def timing(self) -> RolloutTiming:
        """The phases recorded so far, in order of beginning."""
        if not self._enabled:
            return NO_TIMING
        phases = sorted(self._phases, key=lambda phase: phase.begin_s)
        left_out = [self._left_out] if self._left_out else []
        return RolloutTiming(accepted_at=self._accepted_at, num_retries=self.num_retries, phases=(*phases, *left_out))

    def _keep(self, phase: OpenPhase, begin_s: float, seconds: float) -> None:
        if len(self._phases) >= MAX_PHASES:
            self._num_left_out += 1
            begin_s = min(begin_s, self._left_out.begin_s) if self._left_out else begin_s
            end_s = time.perf_counter() - self._zero
            detail = f"{self._num_left_out} more phases"
            self._left_out = RolloutPhase(
                what=PhaseKind.NOT_RECORDED, begin_s=begin_s, seconds=end_s - begin_s, detail=detail
            )
            return
        versions = [segment.weight_version for segment in phase.segments if segment.num_tokens]
        self._phases.append(
            RolloutPhase(
                what=phase.what,
                begin_s=begin_s,
                seconds=seconds,
                policy=phase.policy,
                num_tokens=sum(segment.num_tokens for segment in phase.segments),
                first_version=min(versions, default=-1),
                last_version=max(versions, default=-1),
                detail=phase.detail[:MAX_DETAIL],
            )
        )


class TimedGateway:
    """The environment gateway for one rollout; records every call on the rollout's clock."""

    def __init__(self, gateway: Gateway, clock: RolloutClock) -> None:
        self._gateway = gateway
        self._clock = clock

    async def execute_code(
        self, code: str, *, stdin: bytes = b"", print_trailing_expression: bool = False
    ) -> Execution:
        with self._clock.phase(PhaseKind.EXECUTE_CODE) as phase:
            execution = await self._gateway.execute_code(
                code, stdin=stdin, print_trailing_expression=print_trailing_expression
            )
            phase.detail = execution.status.value
            return execution

    async def create_episode(self, environment: str, task: Task, seed: int) -> Episode:
        with self._clock.phase(PhaseKind.CREATE_EPISODE) as phase:
            episode = await self._gateway.create_episode(environment, task, seed)
            phase.detail = environment
            return episode

    async def step(self, episode_id: str, turn: int, action: str) -> Step:
        with self._clock.phase(PhaseKind.STEP) as phase:
            step = await self._gateway.step(episode_id, turn, action)
            phase.detail = f"turn {turn}, reward {step.reward:g}" + (", done" if step.done else "")
            return step

    async def close(self, episode_id: str) -> None:
        with self._clock.phase(PhaseKind.CLOSE_EPISODE):
            await self._gateway.close(episode_id)

    async def compute_reward(self, reward: str, task: Task, completion: str) -> Reward:
        with self._clock.phase(PhaseKind.COMPUTE_REWARD) as phase:
            found = await self._gateway.compute_reward(reward, task, completion)
            phase.detail = f"{reward}: {found.value:g}" + (", unparsed" if found.unparsed else "")
            return found

    async def judge(
        self, code: str, cases: Sequence[JudgeCase], *, entry_point: str = "", case_time_s: float = 6.0
    ) -> tuple[CaseOutcome, ...]:
        with self._clock.phase(PhaseKind.JUDGE) as phase:
            outcomes = await self._gateway.judge(code, cases, entry_point=entry_point, case_time_s=case_time_s)
            phase.detail = f"{sum(outcome.passed for outcome in outcomes)} of {len(outcomes)} cases passed"
            return outcomes
