"""Generates a scripted policy's text: a script is a function from a ``Cue`` (the state of the rollout) to text.

    workflow -> RolloutPolicy.generate(prompt) -> Scene.forced_ids -> script(cue) -> text -> tokens -> replay engine

Workflows and engines do not depend on scripts: the same workflow makes the same requests, and only the tokens come from the
script. Scripts are pure functions of their cue, so a repeated rollout has the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from services.common.records.types import PlayedBy, Purpose, Task, part_for
from services.common.text.chat import Chat

Script = Callable[["Cue"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTurn:
    """The text of one policy's earlier turn."""

    policy: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """The state of a rollout when a policy's turn begins.

    ``prompt`` is the policy's whole prompt as text with the marks of the chat template. ``said`` has the earlier turns of all
    policies in this rollout, oldest first. ``settings`` are the workflow's, validated and with their defaults.
    """

    policy: str
    task: Task
    purpose: Purpose
    prompt: str
    said: tuple[EarlierTurn, ...]
    settings: Any
    right_share: float
    num_words: int
    seed: int  # of this rollout

    def random(self, topic: str = "") -> random.Random:
        """The random generator of this rollout for one topic; each call returns the same draws."""
        return random.Random(xxhash.xxh3_64_intdigest(f"{self.seed}/{topic}".encode()))

    def is_right(self, topic: str = "") -> bool:
        """Whether to answer right about ``topic``: True in ``right_share`` of the rollouts."""
        return self.random(f"right/{topic}").random() < self.right_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A script and the settings of its workflow."""

    script: Script
    settings: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptBook:
    """The scripts of a recipe by the rollout's purpose and dataset, with their settings."""

    parts: Mapping[PlayedBy, Part]
    right_share: float
    num_words: int
    seed: int


class Scene:
    """The state of one rollout for scripts, over all of its policies."""

    def __init__(self, task: Task, purpose: Purpose, seed: int, source: str = "") -> None:
        """``source``: of the task's order."""
        self._task = task
        self._purpose = purpose
        self._source = source
        self._seed = seed
        self._said: list[EarlierTurn] = []

    def forced_ids(self, book: ScriptBook, policy: str, chat: Chat, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the policy's next turn, with the end of the turn."""
        return (*chat.encode(self.text(book, policy, chat.decode(prompt_ids))), chat.end_of_turn_id)

    def text(self, book: ScriptBook, policy: str, prompt: str) -> str:
        """The text of the policy's next turn after a prompt."""
        part = part_for(book.parts, self._purpose, self._source)
        cue = Cue(
            policy=policy,
            task=self._task,
            purpose=self._purpose,
            prompt=prompt,
            said=tuple(self._said),
            settings=part.settings,
            right_share=book.right_share,
            num_words=book.num_words,
            seed=xxhash.xxh3_64_intdigest(f"{book.seed}/{self._seed}".encode()),
        )
        return part.script(cue)

    def add_turn(self, policy: str, text: str) -> None:
        """Record a policy's turn, which its budget may have cut."""
        self._said.append(EarlierTurn(policy=policy, text=text))
