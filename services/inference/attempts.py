"""Playing one slot to its outcome: within its time, again after an infrastructure failure, at the versions required.

    play -> within order.timeout_s: attempt 0, 1, ... infra_retries -> workflow -> outcome, checked, scored by teachers

A rollout that outlives its time is the policy's doing (``RolloutTimeoutError``) only where no machinery failed in it or is
ill, and a generation was all that was waited for at its end: everything else costs the policy nothing.
Knows nothing about slots, records, or who ordered it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import structlog

from services.common.accounts import TimeAccount
from services.common.errors import (
    CapacityError,
    DeadlineError,
    EpisodeNotFoundError,
    InfrastructureError,
    RolloutTimeoutError,
    WeightsStaleError,
)
from services.common.seeds import derived_seed, slot_seed
from services.common.types import Purpose, TaskGroupOrder
from services.inference.policies import RolloutPolicy, ServedPolicy
from services.inference.scoring import Teachers
from services.inference.scripts.base import Scene
from services.inference.timing import GENERATE, RolloutClock, TimedGateway
from services.inference.workflows.base import Endpoint, Gateway, Outcome, Workflow, WorkflowContext

log = structlog.get_logger(__name__)

_RETRYABLE = (InfrastructureError, EpisodeNotFoundError, CapacityError, DeadlineError)
_RETRY_BASE_S = 0.2
_CLOCK_TICK_S = 0.01  # a loop's timer may fire that much early


class Attempts:
    """What every rollout of a replica is played with."""

    def __init__(
        self,
        *,
        workflows: Mapping[Purpose, Workflow],
        policies: Mapping[str, ServedPolicy],
        gateway: Gateway,
        endpoint: Endpoint | None,
        infra_retries: int,
        account: TimeAccount,
        teachers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``teachers``: the policies that score what others sampled for training, by the policy that is taught."""
        self._workflows = workflows
        self._policies = policies
        self._gateway = gateway
        self._endpoint = endpoint
        self._infra_retries = infra_retries
        self._account = account
        self._teachers = Teachers(policies, teachers, account)
        self.num_retries = 0  # since the start of the process

    async def play(self, order: TaskGroupOrder, index: int, clock: RolloutClock) -> Outcome:
        """The outcome of one slot of an order.

        Raises:
            RolloutTimeoutError: the policy was too slow.
            DeadlineError: the time was over, and the policy was not all that took it.
            MillraceError: the last attempt failed, or a policy moved on from a required version.
            Exception: whatever a workflow, tool or reward of the user raises.
        """
        limit = asyncio.timeout(order.timeout_s)
        try:
            async with limit:
                return await self._play_with_retries(order, index, clock, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            late = (
                f"rollout {order.task_group_id}/{index} was not done within {order.timeout_s:g} s (rollout.timeout_s)"
            )
            # Code of a workflow, a reward or an agent may wait for anything: it does not count as the policy's.
            waits = clock.waited_for((limit.when() or 0.0) - _CLOCK_TICK_S)
            healthy = all(policy.engine.health().ok for policy in self._policies.values())
            if waits == {GENERATE} and clock.num_retries == 0 and healthy:
                raise RolloutTimeoutError(late) from None
            named = ", ".join(sorted(waits)) or "its own code"
            raise DeadlineError(f"{late}, after {clock.num_retries} retries and while it waited for {named}") from None

    async def _play_with_retries(
        self, order: TaskGroupOrder, index: int, clock: RolloutClock, limit: asyncio.Timeout
    ) -> Outcome:
        for attempt in range(self._infra_retries + 1):
            try:
                return await self._play_once(order, index, attempt, clock)
            except _RETRYABLE as error:
                # What fails while a rollout that is out of time cleans up is not played again: nothing would end it.
                if attempt == self._infra_retries or limit.expired():
                    raise
                self.num_retries += 1
                clock.num_retries += 1
                log.warning(
                    "rollout.retry", task_group=order.task_group_id, index=index, attempt=attempt, error=str(error)
                )
                with self._account.during("pausing before another attempt") as wait, clock.phase("retry") as phase:
                    wait.note(error.message)
                    phase.detail = error.reason
                    await asyncio.sleep(_RETRY_BASE_S * 2**attempt * (0.5 + random.random()))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _play_once(self, order: TaskGroupOrder, index: int, attempt: int, clock: RolloutClock) -> Outcome:
        self._check_versions(order.required_versions)
        slot = f"{order.task_group_id}/{index}"
        # Another attempt has the same seeds: attempts that drew anew would select against what the machinery fails on.
        seed = slot_seed(order.seed, index)
        scene = Scene(order.task, order.purpose, seed)
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
            if (name in order.policies if order.policies else name not in self._teachers.names)
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
        outcome = await self._workflows[order.purpose].run(order.task, context)
        _check_outcome(outcome, order.required_versions)
        if order.purpose is not Purpose.TRAIN:
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
    """A workflow's outcome must be usable, and an evaluation must not have seen a swap in its middle."""
    if not outcome.sequences:
        raise ValueError("the workflow returned no sequence")
    for value in (outcome.reward, *(sequence.reward for sequence in outcome.sequences)):
        if not math.isfinite(value):
            raise ValueError(f"the workflow returned the reward {value}; it must be a finite number")
    if not required:
        return
    for sequence in outcome.sequences:
        number = required.get(sequence.policy)
        for segment in sequence.segments:
            if number is not None and segment.is_policy and segment.weight_version != number:
                raise WeightsStaleError(
                    f"policy {sequence.policy} moved to version {segment.weight_version} during an evaluation of {number}"
                )
