"""Plays one slot: enforces its time limit, retries infrastructure failures, checks the required versions.

    play -> within order.timeout_s: attempt 0, 1, ... infra_retries -> workflow -> outcome, checked, scored by teachers

A rollout that exceeds its time limit counts against the policy (``RolloutTimeoutError``) only if no infrastructure failed
in the rollout or is unhealthy, and the rollout waited only for a generation at its end. Every other case is an
infrastructure failure. Independent of slots, records and the source of orders.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType

import structlog

from services.common.errors import (
    CapacityError,
    DeadlineError,
    EpisodeNotFoundError,
    InfrastructureError,
    RolloutTimeoutError,
    WeightsStaleError,
)
from services.common.records.phases import PhaseKind
from services.common.records.types import PlayedBy, Purpose, TaskGroupOrder, part_for
from services.common.seeds import derived_seed, slot_seed
from services.common.telemetry.accounts import TimeAccount
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.log_events import LogEvent
from services.common.user_code import place_of
from services.inference.rollouts.policies import RolloutPolicy, ServedPolicy
from services.inference.rollouts.scoring import Teachers
from services.inference.rollouts.timing import RolloutClock, TimedGateway
from services.inference.scripts.base import Scene
from services.inference.workflows.base import Endpoint, Gateway, Outcome, Workflow, WorkflowContext

log = structlog.get_logger(__name__)

_RETRYABLE = (InfrastructureError, EpisodeNotFoundError, CapacityError, DeadlineError)
_RETRY_BASE_S = 0.2
_CLOCK_TICK_S = 0.01  # a loop's timer may fire that much early


class Attempts:
    """The policies, workflows and gateway that all rollouts of a replica share."""

    def __init__(
        self,
        *,
        workflows: Mapping[PlayedBy, Workflow],
        policies: Mapping[str, ServedPolicy],
        gateway: Gateway,
        endpoint: Endpoint | None,
        infra_retries: int,
        account: TimeAccount,
        teachers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``teachers``: student policy -> the policy that scores the student's training tokens."""
        self._workflows = workflows
        self._policies = policies
        self._gateway = gateway
        self._endpoint = endpoint
        self._infra_retries = infra_retries
        self._account = account
        self._teachers = Teachers(policies, teachers, account) if teachers else None
        # A teacher plays only in orders that name it.
        self._teacher_names: frozenset[str] = self._teachers.names if self._teachers is not None else frozenset()
        self._limits: dict[asyncio.Timeout, float] = {}  # of the running rollouts; what is left while they stand still
        self._stands_still = False
        self.num_retries = 0  # since the start of the process

    async def play(self, order: TaskGroupOrder, index: int, clock: RolloutClock) -> Outcome:
        """The outcome of one slot of an order.

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
                return await self._play_with_retries(order, index, clock, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            late = (
                f"rollout {order.task_group_id}/{index} was not done within {order.timeout_s:g} s (rollout.timeout_s)"
            )
            # Code of a workflow, a reward or an agent may wait for anything: such waits do not count against the policy.
            waits = clock.waited_for((limit.when() or 0.0) - _CLOCK_TICK_S)
            healthy = all(policy.engine.health().ok for policy in self._policies.values())
            if waits == {PhaseKind.GENERATE} and clock.num_retries == 0 and healthy:
                raise RolloutTimeoutError(late) from None
            named = ", ".join(sorted(waits)) or "its own code"
            raise DeadlineError(
                f"{late}, after {clock.num_retries} retries and while the rollout waited for {named}"
            ) from None
        finally:
            self._limits.pop(limit, None)

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

    async def _play_with_retries(
        self, order: TaskGroupOrder, index: int, clock: RolloutClock, limit: asyncio.Timeout
    ) -> Outcome:
        for attempt in range(self._infra_retries + 1):
            try:
                return await self._play_once(order, index, attempt, clock)
            except _RETRYABLE as error:
                # No retry for a failure in the cleanup after the time limit: the limit would not end the retry.
                if attempt == self._infra_retries or limit.expired():
                    raise
                self.num_retries += 1
                clock.num_retries += 1
                log.warning(
                    LogEvent.ROLLOUT_RETRY,
                    task_group=order.task_group_id,
                    index=index,
                    attempt=attempt,
                    error=str(error),
                )
                with (
                    self._account.during(ActivityName.PAUSING_BEFORE_RETRY) as wait,
                    clock.phase(PhaseKind.RETRY) as phase,
                ):
                    wait.note(error.message)
                    phase.detail = error.reason
                    await asyncio.sleep(_RETRY_BASE_S * 2**attempt * (0.5 + random.random()))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _play_once(self, order: TaskGroupOrder, index: int, attempt: int, clock: RolloutClock) -> Outcome:
        self._check_versions(order.required_versions)
        slot = f"{order.task_group_id}/{index}"
        # Another attempt has the same seeds: new draws would select against samples on which infrastructure fails.
        seed = slot_seed(order.seed, index)
        scene = Scene(order.task, order.purpose, seed, order.source)
        policies = {
            name: RolloutPolicy(
                policy,
                request_prefix=f"{slot}/{attempt}",
                seed=derived_seed(seed, name),  # two policies of a rollout draw independently
                account=self._account,
                scene=scene,
                clock=clock,
                purpose=order.purpose,
            )
            for name, policy in self._policies.items()
            if (name in order.policies if order.policies else name not in self._teacher_names)
        }
        context = WorkflowContext(
            policies=policies,
            gateway=TimedGateway(self._gateway, clock),
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
        _check_outcome(outcome, order.required_versions)
        if self._teachers is None or order.purpose is not Purpose.TRAIN:
            return outcome
        prefix = f"{slot}/{attempt}"
        return replace(outcome, sequences=await self._teachers.scored(outcome.sequences, order.sampling, clock, prefix))

    def _check_versions(self, required: Mapping[str, int]) -> None:
        for name, number in required.items():
            policy = self._policies.get(name)
            if policy is None or policy.engine.version != number:
                held = "not served here" if policy is None else f"at version {policy.engine.version}"
                raise WeightsStaleError(f"policy {name} must be at version {number} and is {held}")


def _check_outcome(outcome: Outcome, required: Mapping[str, int]) -> None:
    """Validate an outcome: sequences, finite rewards, and in an evaluation no swap of weights."""
    if not outcome.sequences:
        raise ValueError("the workflow returned no sequence")
    for value in (outcome.reward, *(sequence.reward for sequence in outcome.sequences)):
        if not math.isfinite(value):
            raise ValueError(f"the workflow returned the reward {value}; must be a finite number")
    if not required:
        return
    for sequence in outcome.sequences:
        number = required.get(sequence.policy)
        for segment in sequence.segments:
            if number is not None and segment.is_policy and segment.weight_version != number:
                raise WeightsStaleError(
                    f"policy {sequence.policy} moved to version {segment.weight_version} during an evaluation of {number}"
                )
