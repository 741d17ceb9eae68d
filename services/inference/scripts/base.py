"""What a forced policy says: a script turns what is known when the policy is asked to speak (a ``Cue``) into text.

    workflow -> RolloutPolicy.generate(prompt) -> Scene.forced_ids -> script(cue) -> text -> tokens -> forced engine

Workflows and engines know nothing of it: the same workflow plays, the same requests are made, and only the choice of the
tokens is taken out of the engine's hands. Scripts are pure functions of their cue, so a rollout that is played again says
the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from services.common.chat import Chat
from services.common.types import Purpose, Task

Script = Callable[["Cue"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one policy said earlier in the rollout."""

    policy: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """What is known when a policy is asked to speak.

    ``prompt`` is all that it reads, as text with the marks of the chat template. ``said`` is what any policy said before
    it in this rollout, oldest first. ``settings`` are the workflow's, checked and with their defaults.
    """

    policy: str
    task: Task
    purpose: Purpose
    prompt: str
    said: tuple[Line, ...]
    settings: Any
    right_share: float
    num_words: int
    seed: int  # of this rollout

    def random(self, topic: str = "") -> random.Random:
        """Draws of this rollout about one topic; the same whenever they are asked for."""
        return random.Random(xxhash.xxh3_64_intdigest(f"{self.seed}/{topic}".encode()))

    def is_right(self, topic: str = "") -> bool:
        """Whether to be right about something: ``right_share`` of the rollouts are."""
        return self.random(f"right/{topic}").random() < self.right_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A script and the settings of the workflow that it speaks in."""

    script: Script
    settings: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptBook:
    """The scripts of a recipe, by what a rollout is for, with what it says about them."""

    parts: Mapping[Purpose, Part]
    right_share: float
    num_words: int
    seed: int


class Scene:
    """One rollout as scripts see it, over all of its policies."""

    def __init__(self, task: Task, purpose: Purpose, seed: int) -> None:
        self._task = task
        self._purpose = purpose
        self._seed = seed
        self._said: list[Line] = []

    def forced_ids(self, book: ScriptBook, policy: str, chat: Chat, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """What the policy is to say next, with the end of its turn."""
        part = book.parts[self._purpose]
        cue = Cue(
            policy=policy,
            task=self._task,
            purpose=self._purpose,
            prompt=chat.decode(prompt_ids),
            said=tuple(self._said),
            settings=part.settings,
            right_share=book.right_share,
            num_words=book.num_words,
            seed=xxhash.xxh3_64_intdigest(f"{book.seed}/{self._seed}".encode()),
        )
        return (*chat.encode(part.script(cue)), chat.end_of_turn_id)

    def heard(self, policy: str, text: str) -> None:
        """Remember what a policy said, which its budget may have cut."""
        self._said.append(Line(policy=policy, text=text))
