"""A growing conversation with one policy: the segments of a sequence, exactly as sampled.

The concatenated segments are at every moment exactly what the engine is asked to continue: token-in, token-out.
Applies budgets (context, response); independent of tools and rewards.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.common.errors import InfrastructureError, PromptTooLongError
from services.common.records.types import Origin, Sampling, Segment, StopReason
from services.common.records.types import Sequence as TokenSequence
from services.common.text.chat import Message
from services.common.text.thoughts import THOUGHT
from services.inference.engine.base import FinishReason, Generation, Watch
from services.inference.workflows.base import PolicyClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The policy's text of one turn, with the tag of a thought that the template begins. ``ended``: by its own stop token,
    not by a budget."""

    text: str
    num_tokens: int
    ended: bool


class Conversation:
    """``max_response_tokens`` bounds all tokens after the prompt, the environment's included. ``thinking`` turns the chat
    template's thinking on or off, if supported; None leaves its default. ``assistant_prefill`` begins every
    turn of the policy: environment tokens, which are not trained."""

    def __init__(
        self,
        policy: PolicyClient,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_prompt_tokens: int | None = None,
        max_response_tokens: int | None = None,
        thinking: bool | None = None,
        assistant_prefill: str = "",
    ) -> None:
        self._policy = policy
        self._chat = policy.chat.with_thinking(thinking).with_prefill(assistant_prefill)
        self._sampling = sampling
        prompt = self._chat.prompt_ids(messages, tools)
        longest = policy.context_length - 1  # at least one token must be new
        if max_prompt_tokens is not None:
            longest = min(longest, max_prompt_tokens)
        if len(prompt) > longest:
            raise PromptTooLongError(f"the prompt has {len(prompt)} tokens; at most {longest} are allowed")
        self._ids = list(prompt)
        self._limit = policy.context_length  # tokens of the whole sequence
        if max_response_tokens is not None:
            self._limit = min(self._limit, len(prompt) + max_response_tokens)
        self._segments = [Segment.environment(prompt)]
        self.num_turns = 0
        self.num_sampled = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple(self._ids)

    async def generate(self) -> Turn:
        """Let the policy take a turn."""
        generation = await self.sample(self._sampling)
        self.take(generation)
        sampled = generation.token_ids
        ended = generation.finish_reason is FinishReason.STOP
        text = self._chat.decode(sampled)
        if self._chat.thinks and not text.lstrip().startswith(THOUGHT):
            text = THOUGHT + text  # which the template wrote: readers of the text alone tell thought and answer apart
        return Turn(text=text, num_tokens=len(sampled), ended=ended)

    async def sample(self, sampling: Sampling, *, watch: Watch | None = None, seed: int | None = None) -> Generation:
        """Generate the policy's next turn within the remaining budgets; ``take`` adds the turn to the conversation."""
        generation = await self._policy.generate(self._ids, self._within_room(sampling), watch=watch, seed=seed)
        if generation.finish_reason is FinishReason.ABORTED:
            raise InfrastructureError("the engine aborted a generation without a cancellation here")
        return generation

    def take(self, generation: Generation) -> None:
        """Make a sampled turn, or the beginning of one, part of the conversation."""
        num_tokens = 0
        for segment in generation.segments:
            self._ids += segment.token_ids.tolist()
            num_tokens += segment.num_tokens
        self._segments += generation.segments
        self.num_turns += 1
        self.num_sampled += num_tokens

    def add(self, *messages: Message) -> bool:
        """Append the environment's answer. False, without appending, if no token could follow."""
        self._chat.check_follows(messages)
        ids = self._chat.continuation_ids(messages, last_sampled=self._ids[-1])
        if len(self._ids) + len(ids) >= self._limit:
            return False
        self._ids += ids
        self._segments.append(Segment.environment(ids))
        return True

    def num_tokens_with(self, *messages: Message) -> int:
        """The number of tokens that ``add`` of these messages would give."""
        return self.num_tokens + len(self._chat.continuation_ids(messages, last_sampled=self._ids[-1]))

    def fork(self, num_segments: int, *messages: Message) -> Conversation | None:
        """A conversation that goes on behind the first segments with ``messages``. These segments, exactly as sampled, are a
        part of its prompt: none of their tokens is trained in it. None if no token could follow."""
        self._chat.check_follows(messages)
        ids = [token for segment in self._segments[:num_segments] for token in segment.token_ids.tolist()]
        ids += self._chat.continuation_ids(messages, last_sampled=ids[-1])
        if len(ids) >= self._limit:
            return None
        forked = copy.copy(self)
        forked._ids = ids
        forked._segments = [Segment.environment(ids)]
        forked.num_turns = forked.num_sampled = 0
        return forked

    def take_back(self) -> None:
        """Undo the last ``add``, if no turn followed."""
        added = self._segments.pop()
        assert not added.is_policy and self._segments, "no segment to take back"
        del self._ids[len(self._ids) - added.num_tokens :]

    def sequence(
        self,
        *,
        reward: float,
        stop_reason: StopReason,
        metrics: Mapping[str, float] | None = None,
        role: str = "agent",
        attempt: int = 0,
        thread: int = 0,
        parent: int | None = None,
        origin: Origin = Origin.ROOT,
    ) -> TokenSequence:
        """The record of this conversation."""
        return TokenSequence(
            policy=self._policy.name,
            role=role,
            attempt=attempt,
            thread=thread,
            parent=parent,
            origin=origin,
            segments=tuple(self._segments),
            reward=reward,
            stop_reason=stop_reason,
            metrics={"turns": float(self.num_turns), "response_tokens": float(self.num_sampled), **(metrics or {})},
        )

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def _within_room(self, sampling: Sampling) -> Sampling:
        room = self._limit - len(self._ids)
        if room >= sampling.max_new_tokens:
            return sampling
        return replace(sampling, max_new_tokens=room, min_new_tokens=min(room, sampling.min_new_tokens))
