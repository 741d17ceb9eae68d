"""What one rollout did and when: a few microseconds per phase, carried home by its record.

Nothing is decided by the times. What was cut short tells a slow policy from machinery that was waited for.

``TimedGateway`` and ``RolloutPolicy`` write into the clock of their rollout; workflows know nothing of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from services.common.errors import MillraceError
from services.common.types import NO_TIMING, RolloutPhase, RolloutTiming, Segment, Task
from services.inference.workflows.base import CaseOutcome, Episode, Execution, Gateway, JudgeCase, Reward, Step

MAX_PHASES = 512  # of one rollout; what comes after is one phase that says how many
MAX_DETAIL = 120  # characters
GENERATE = "generate"  # the phase of a policy's turn
SCORE = "score"  # the phase in which a teacher looks at what was generated


@dataclass(slots=True)
class OpenPhase:
    """What may still be said of a phase while it lasts."""

    detail: str = ""
    segments: tuple[Segment, ...] = ()  # that were generated


class RolloutClock:
    """Starts when it is made. One for each rollout; its phases may overlap."""

    def __init__(self, accepted_at: float = 0.0, *, enabled: bool = True) -> None:
        """``accepted_at``: when the order came, in seconds since the epoch. Disabled, it records nothing."""
        self.started_at = time.time()
        self.num_retries = 0
        self._open: Counter[str] = Counter()  # phases by kind
        self._cut_short: dict[str, float] = {}  # kind of phase -> when a cancellation last ended one, as time.monotonic
        self._accepted_at = accepted_at
        self._enabled = enabled
        self._zero = time.perf_counter()
        self._phases: list[RolloutPhase] = []
        self._left_out: RolloutPhase | None = None
        self._num_left_out = 0

    def waited_for(self, since: float) -> set[str]:
        """Kinds of phases that a cancellation has cut short since then (time.monotonic), or is about to."""
        return {what for what, at in self._cut_short.items() if at >= since} | {w for w, n in self._open.items() if n}

    @contextmanager
    def phase(self, what: str, policy: str = "") -> Iterator[OpenPhase]:
        """Record the body as a phase, also when it raises."""
        phase = OpenPhase()
        begin_s = time.perf_counter() - self._zero
        self._open[what] += 1
        try:
            yield phase
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self._cut_short[what] = time.monotonic()
            phase.detail = error.reason if isinstance(error, MillraceError) else type(error).__name__
            raise
        finally:
            self._open[what] -= 1
            if self._enabled:
                self._keep(what, policy, begin_s, time.perf_counter() - self._zero - begin_s, phase)

    def timing(self) -> RolloutTiming:
        """What was recorded by now, in order of beginning."""
        if not self._enabled:
            return NO_TIMING
        phases = sorted(self._phases, key=lambda phase: phase.begin_s)
        left_out = [self._left_out] if self._left_out else []
        return RolloutTiming(accepted_at=self._accepted_at, num_retries=self.num_retries, phases=(*phases, *left_out))

    def _keep(self, what: str, policy: str, begin_s: float, seconds: float, phase: OpenPhase) -> None:
        if len(self._phases) >= MAX_PHASES:
            self._num_left_out += 1
            begin_s = min(begin_s, self._left_out.begin_s) if self._left_out else begin_s
            end_s = time.perf_counter() - self._zero
            detail = f"{self._num_left_out} more phases"
            self._left_out = RolloutPhase(what="not_recorded", begin_s=begin_s, seconds=end_s - begin_s, detail=detail)
            return
        versions = [segment.weight_version for segment in phase.segments if segment.num_tokens]
        self._phases.append(
            RolloutPhase(
                what=what,
                begin_s=begin_s,
                seconds=seconds,
                policy=policy,
                num_tokens=sum(segment.num_tokens for segment in phase.segments),
                first_version=min(versions, default=-1),
                last_version=max(versions, default=-1),
                detail=phase.detail[:MAX_DETAIL],
            )
        )


class TimedGateway:
    """The environment gateway as one rollout sees it, with every call on the rollout's clock."""

    def __init__(self, gateway: Gateway, clock: RolloutClock) -> None:
        self._gateway = gateway
        self._clock = clock

    async def execute_code(
        self, code: str, *, stdin: bytes = b"", print_trailing_expression: bool = False
    ) -> Execution:
        with self._clock.phase("execute_code") as phase:
            execution = await self._gateway.execute_code(
                code, stdin=stdin, print_trailing_expression=print_trailing_expression
            )
            phase.detail = execution.status.value
            return execution

    async def create_episode(self, environment: str, task: Task, seed: int) -> Episode:
        with self._clock.phase("create_episode") as phase:
            episode = await self._gateway.create_episode(environment, task, seed)
            phase.detail = environment
            return episode

    async def step(self, episode_id: str, turn: int, action: str) -> Step:
        with self._clock.phase("step") as phase:
            step = await self._gateway.step(episode_id, turn, action)
            phase.detail = f"turn {turn}, reward {step.reward:g}" + (", done" if step.done else "")
            return step

    async def close(self, episode_id: str) -> None:
        with self._clock.phase("close_episode"):
            await self._gateway.close(episode_id)

    async def compute_reward(self, reward: str, task: Task, completion: str) -> Reward:
        with self._clock.phase("compute_reward") as phase:
            found = await self._gateway.compute_reward(reward, task, completion)
            phase.detail = f"{reward}: {found.value:g}" + (", unparsed" if found.unparsed else "")
            return found

    async def judge(
        self, code: str, cases: Sequence[JudgeCase], *, entry_point: str = "", case_time_s: float = 6.0
    ) -> tuple[CaseOutcome, ...]:
        with self._clock.phase("judge") as phase:
            outcomes = await self._gateway.judge(code, cases, entry_point=entry_point, case_time_s=case_time_s)
            phase.detail = f"{sum(outcome.passed for outcome in outcomes)} of {len(outcomes)} cases passed"
            return outcomes
