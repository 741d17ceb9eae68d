"""A replica's served policies, and the policy object that one rollout uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.records.phases import PhaseKind
from services.common.records.types import Purpose, Sampling
from services.common.telemetry.accounts import TimeAccount
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.components import engine as engine_component
from services.common.text.chat import Chat
from services.inference.engine.base import Engine, Generation, GenerationRequest, Watch
from services.inference.rollouts.timing import RolloutClock
from services.inference.scripts.base import Scene, ScriptBook

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

    __slots__ = (
        *("_account", "_clock", "_lane", "_num_requests", "_policy", "_record_kept"),
        *("_request_prefix", "_scene", "_seed", "chat", "context_length", "name"),
    )

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
        self._clock = clock or RolloutClock(enabled=False)
        self._record_kept = purpose is Purpose.TRAIN
        self._num_requests = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, watch: Watch | None = None, seed: int | None = None
    ) -> Generation:
        number = self._num_requests
        self._num_requests += 1
        request = GenerationRequest(
            request_id=f"{self._request_prefix}/{self.name}/{number}",
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            stop_token_ids=self.chat.stop_token_ids,
            seed=(self._seed + number if seed is None else seed) & _SEED_MASK,
            forced_ids=self._forced_ids(prompt_ids),
            record_kept=self._record_kept,
            watch=watch,
        )
        with (
            self._account.during(ActivityName.GENERATING, on=engine_component(self.name), lane=self._lane),
            self._clock.phase(PhaseKind.GENERATE, self.name) as phase,
        ):
            generation = await self._policy.engine.generate(request)
            phase.segments, phase.detail = generation.segments, generation.finish_reason.value
        if request.forced_ids is not None and self._scene is not None:
            self._scene.add_turn(self.name, self.chat.decode(generation.token_ids))
        return generation

    def _forced_ids(self, prompt_ids: Sequence[int]) -> tuple[int, ...] | None:
        if self._policy.script is None or self._scene is None:
            return None
        return self._scene.forced_ids(self._policy.script, self.name, self.chat, prompt_ids)
