"""Episodes as conversations: messages of both sides, one turn at a time, until one side ends the conversation.

Invariants
- A place is taken from the start of a conversation to its end, for any kind of end.
- One turn at a time: another one meanwhile is refused, never interleaved.
- A turn that failed for infrastructure is tried again; after repeated failures, or the loss of the episode, the
  conversation is over and has no reward.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from services.common.aio import backoff
from services.common.errors import (
    CapacityError,
    EpisodeNotFoundError,
    InfrastructureError,
    NotFoundError,
    RollmillError,
    StateError,
)
from services.envgateway.envs.agentbench.messages import Index
from services.envgateway.envs.base import EndStatus, Observation, StepResult
from services.envgateway.envs.episodes import LONGEST_SWEEP_PAUSE_S, EpisodeManager
from services.envgateway.taskserver.tasks import Task

log = structlog.get_logger()


Message = dict[str, str]  # role (user, agent), content

_MOST_PIECES = 3500
_LETTERS_A_PIECE = 7
_PIECE = re.compile(r"[^\W\d_]+|[^ \n]")


def num_pieces(text: str, most: int) -> int:
    """About the number of tokens: every seven letters of a word one, every other character one.

    Counts no further than ``most``: a turn may have megabytes.
    """
    pieces = 0
    for found in _PIECE.finditer(text):
        piece = found[0]
        pieces += -(-len(piece) // _LETTERS_A_PIECE) if piece[0].isalpha() else 1
        if pieces >= most:
            break
    return pieces


def cut(messages: Sequence[Message], most: int = _MOST_PIECES) -> list[Message]:
    """The first message, and the newest others that fit; the first names the number of those left out."""
    first, others = messages[0], messages[1:]
    pieces, kept = num_pieces(first["content"], most), 0
    for message in reversed(others):
        pieces += num_pieces(message["content"], most)
        if pieces >= most:
            break
        kept += 1
    if kept and others[-kept]["role"] == first["role"]:
        kept -= 1  # the first message is a user's: an agent's comes next
    omitted = len(others) - kept
    if omitted:
        first = {**first, "content": f"{first['content']}\n\n[NOTICE] {omitted} messages are omitted."}
    return [first, *others[len(others) - kept :]]


RUNNING = "running"
CANCELLED = "unknown"  # AgentBench has no such status
_ATTEMPTS = 3
_ROLES = {"assistant": "agent"}  # all other roles are unchanged


@dataclass(slots=True, eq=False)
class Conversation:
    number: int
    uuid: str
    task: Task
    index: Index
    episode_id: str
    history: list[Message]
    remembered: str  # replaces its last message when there is a newer one; empty: the message stays
    started: float = field(default_factory=time.time)  # seconds since 1970
    last_update: float = field(default_factory=time.time)
    turn: int = 0
    reward: float = 0.0  # of all turns together
    status: str = RUNNING
    metrics: Mapping[str, float] = field(default_factory=dict)
    busy: bool = False


class Conversations:
    """Holds all live conversations. ``expire_forever`` runs in a task and ends those without new turns."""

    def __init__(self, episodes: EpisodeManager, *, idle_s: float) -> None:
        self._episodes = episodes
        self._idle_s = idle_s
        self._numbers = itertools.count()
        self._by_number: dict[int, Conversation] = {}
        self._by_uuid: dict[str, Conversation] = {}
        self._taken: Counter[str] = Counter()  # places by task name

    @property
    def all(self) -> list[Conversation]:
        return list(self._by_number.values())

    def num_taken(self, task: Task) -> int:
        """Places taken, also by conversations that are just beginning."""
        return self._taken[task.name]

    def by_number(self, number: int) -> Conversation:
        """Raises ``NotFoundError``."""
        return _found(self._by_number.get(number), number)

    def by_uuid(self, name: str) -> Conversation:
        """Raises ``NotFoundError``."""
        return _found(self._by_uuid.get(name), name)

    async def start(self, task: Task, index: Index) -> Conversation:
        """Begin one; its history ends with the first turn of the environment.

        Raises:
            CapacityError: the task, or the gateway, has no place.
            RollmillError: told by the environment.
        """
        if self._taken[task.name] >= task.config.concurrency:
            raise CapacityError(f"{task.config.concurrency} conversations of {task.name} are going on")
        self._taken[task.name] += 1
        try:
            seed = index if isinstance(index, int) else 0
            start = await self._episodes.create("", task.environment, task.row(index), seed)
        except BaseException:
            self._taken[task.name] -= 1
            raise
        history = _opening(start.observation)
        one = Conversation(
            next(self._numbers), str(uuid.uuid4()), task, index, start.episode_id, history, start.observation.remembered
        )
        self._by_number[one.number] = self._by_uuid[one.uuid] = one
        return one

    async def say(self, one: Conversation, content: str) -> None:
        """The agent's turn, and the environment's answer to it.

        Raises:
            StateError: a turn is being taken.
            NotFoundError: the conversation has ended meanwhile.
            InfrastructureError: the conversation is over, without a reward.
        """
        if one.busy:
            raise StateError(f"session {one.number} is busy: its last turn is not over")
        one.busy, one.last_update = True, time.time()
        try:
            result = await self._take_turn(one, content)
        except RollmillError:
            await self.end(one)
            raise
        finally:
            one.busy, one.last_update = False, time.time()
        one.turn += 1
        one.reward += result.reward
        one.metrics = result.metrics
        if one.remembered:
            one.history[-1] = {**one.history[-1], "content": one.remembered}
        one.remembered = result.remembered
        one.history.append({"role": "agent", "content": content})
        if result.done:
            await self.end(one, result.status or EndStatus.COMPLETED)
        else:
            one.history.append({"role": "user", "content": result.observation})

    async def end(self, one: Conversation, status: str = CANCELLED) -> None:
        """Over; a turn that is being taken is lost."""
        if self._by_number.pop(one.number, None) is None:
            return
        del self._by_uuid[one.uuid]
        self._taken[one.task.name] -= 1
        one.status = status
        await self._episodes.close(one.episode_id)

    async def end_all(self) -> None:
        for one in self.all:
            await self.end(one)

    async def expire_forever(self) -> None:
        """Ends by cancellation."""
        while True:
            await asyncio.sleep(min(LONGEST_SWEEP_PAUSE_S, self._idle_s / 4))
            await self.expire()

    async def expire(self) -> None:
        """End those that have been silent for too long; their episodes have expired, too."""
        oldest = time.time() - self._idle_s
        overdue = [one for one in self.all if not one.busy and one.last_update < oldest]
        for one in overdue:
            await self.end(one)
        if overdue:
            log.info("taskserver.expired", conversations=len(overdue))

    async def _take_turn(self, one: Conversation, content: str) -> StepResult:
        """Take a turn, and repeat a turn that failed for infrastructure: HTTP's clients repeat no request."""
        failure: InfrastructureError | None = None
        for _, pause_s in zip(range(_ATTEMPTS), backoff(), strict=False):
            try:
                return await self._episodes.step(one.episode_id, one.turn + 1, content)
            except EpisodeNotFoundError:
                if failure is not None:
                    raise failure from None  # the reason of the loss of the episode
                raise
            except InfrastructureError as error:
                failure = error
                await asyncio.sleep(pause_s)
        assert failure is not None
        raise failure


def _found(one: Conversation | None, name: object) -> Conversation:
    if one is None:
        raise NotFoundError(f"no conversation {name}: it never began, or it has ended")
    return one


def _opening(observation: Observation) -> list[Message]:
    messages = observation.messages or ({"role": "user", "content": observation.text},)
    return [{"role": _ROLES.get(m["role"], m["role"]), "content": m["content"]} for m in messages]
