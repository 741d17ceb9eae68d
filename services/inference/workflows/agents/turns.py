"""Types of captured conversations: a request for a turn, a thread that grows, and the turn that answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from services.common.text.chat import Message
from services.inference.engine.base import Generation
from services.inference.workflows.agents.chat_messages import Answer
from services.inference.workflows.agents.lineage import Lineage, TurnMark
from services.inference.workflows.conversation import Conversation

DEFAULT_MODEL = "default"  # the name under which a request asks for the session's own policy


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One request for a turn, without its messages. A field that is None has the run's value."""

    policy: str
    tools: Sequence[Mapping[str, Any]] = ()
    read_calls: bool = True
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None

    def tools_key(self) -> bytes:
        return orjson.dumps(list(self.tools), option=orjson.OPT_SORT_KEYS) if self.tools else b""


@dataclass(slots=True, eq=False)
class Thread:
    """One sequence that grows."""

    policy: str
    tools_key: bytes
    conversation: Conversation
    messages: list[Message]  # of all turns
    number: int
    lineage: Lineage
    marks: list[TurnMark] = field(default_factory=list)  # of all turns
    reward: float | None = None  # of this sequence alone
    busy: bool = False
    ended: bool = True  # the last turn, by itself
    text: str = ""  # of the last turn

    @property
    def num_messages(self) -> int:
        return len(self.messages)

    @property
    def parent(self) -> Thread | None:
        found: Thread | None = self.lineage.parent
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTurn:
    """An answer. ``generation`` has the tokens to train; ``answer`` is the text for the agent."""

    thread: Thread
    answer: Answer
    generation: Generation
    ended: bool  # by itself or at a stop text, not by a budget
    stop: str | None  # the text of the request that ended the turn
    num_prompt_tokens: int
    num_messages: int  # of the thread, up to and with the answer

    @property
    def num_sampled_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.generation.segments)


Located = tuple[Thread | None, Sequence[Message]]
