"""What an agent outside says and hears in one rollout, captured as sequences: exactly as sampled.

    request's messages --extend a thread--> its sampled ids + ids of what is new --> policy --> answer
                       '-extend none-----> another thread: another sequence of the trajectory (or refused)

Agents send their whole conversation with every request, as text. A ``Thread`` remembers it as messages beside its ids:
a request that repeats them, the policy's own answer included, continues from the ids, and nothing is tokenised twice.
One that does not repeat them has rewritten its history; its messages are another prompt, and nothing of it is trained but
what is sampled from then on. It knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from services.common.chat import Message
from services.common.errors import InfrastructureError, InvalidRequestError, MillraceError, PromptTooLongError
from services.common.kept_tokens import WHOLE, pack
from services.common.types import LEAST_TRAINED_TEMPERATURE, Purpose, Sampling, StopReason
from services.common.types import Sequence as TokenSequence
from services.inference.engine.base import FinishReason, Generation
from services.inference.workflows.base import PolicyClient
from services.inference.workflows.chat_messages import answer_message, plain_message, same_messages, shown_to_template
from services.inference.workflows.conversation import Conversation
from services.inference.workflows.spoken import StopWatch
from services.inference.workflows.tool_use import describe_tools

Rewrites = Literal["new_sequence", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request for a turn, without its messages. What is None is the run's."""

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
    messages: list[Message]  # all that was said and heard
    number: int
    busy: bool = False
    ended: bool = True  # the last turn, by itself
    text: str = ""  # of the last turn

    @property
    def num_messages(self) -> int:
        return len(self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTurn:
    """An answer. ``generation`` is what is trained; the message is what the agent is told of it."""

    thread: Thread
    message: Mapping[str, Any]
    generation: Generation
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int


Located = tuple[Thread | None, Sequence[Message]]


class CapturedSession:
    """The policies of one rollout as an agent outside may ask them, any number of requests at once."""

    def __init__(
        self,
        policies: Mapping[str, PolicyClient],
        sampling: Sampling,
        *,
        default_policy: str | None = None,
        rewrites: Rewrites = "new_sequence",
        client_sampling: bool = False,
        max_sequences: int = 64,
        thinking: bool | None = None,
        purpose: Purpose = Purpose.TRAIN,
    ) -> None:
        """``client_sampling``: temperature, top_p, top_k, min_p and seed of requests count, instead of the run's. What is captured then
        says what each turn was sampled with, and is trained under that."""
        self.policies = policies
        self.default_policy = default_policy or (next(iter(policies)) if len(policies) == 1 else None)
        self.failure: MillraceError | None = None  # of the machinery; an agent may have swallowed it
        self.last: Thread | None = None
        self._sampling = sampling
        self._rewrites = rewrites
        self._client_sampling = client_sampling
        self._max_sequences = max_sequences
        self._thinking = thinking
        self._purpose = purpose
        self._threads: list[Thread] = []

    # -- asking -------------------------------------------------------------------------------------------------

    def locate(self, ask: Ask, messages: Sequence[Message]) -> Located:
        """The thread whose messages, all of them, begin these and are followed by something new; the longest."""
        tools_key = ask.tools_key()
        found = None
        for thread in self._threads:
            length = thread.num_messages
            if (
                length < len(messages)
                and not thread.busy
                and (thread.policy, thread.tools_key) == (ask.policy, tools_key)
                and (found is None or length > found.num_messages)
                and same_messages(thread.messages, messages[:length])
            ):
                found = thread
        return found, messages[found.num_messages if found else 0 :]

    async def take_turn(
        self, ask: Ask, locate: Callable[[], Located], on_token: Callable[[int], None] | None = None
    ) -> CapturedTurn:
        """Answer what ``locate`` finds: the thread that a request extends and the plain messages that are new in it, or None
        and all of its messages. It is asked when the turn begins, for threads move on.

        Cancelled or failed, it leaves everything as it was. Raises ``InvalidRequestError`` and ``PromptTooLongError`` for
        what the agent did, ``InfrastructureError`` for what it did not.
        """
        thread, new = locate()
        if not new or new[-1]["role"] == "assistant":
            raise InvalidRequestError(
                "messages must end with what the policy is to answer, not with an assistant message"
            )
        try:
            if thread is None:
                return await self._speak(ask, self._begin(ask, new), on_token)
            if not thread.conversation.add(*[shown_to_template(message) for message in new]):
                raise PromptTooLongError(f"{thread.conversation.num_tokens} tokens and these messages fill the context")
            thread.messages += new
            try:
                return await self._speak(ask, thread, on_token)
            except BaseException:  # cancelled, too: the client left
                del thread.messages[thread.num_messages - len(new) :]
                thread.conversation.take_back()
                raise
        except InfrastructureError as error:
            self.failure = self.failure or error
            raise

    def _begin(self, ask: Ask, messages: Sequence[Message]) -> Thread:
        siblings = [thread for thread in self._threads if thread.policy == ask.policy]
        if siblings and self._rewrites == "refuse":
            raise InvalidRequestError(
                "the messages do not extend the conversation of this session, word for word, and "
                "workflow.settings.rewrites is `refuse`",
                code="history_rewritten",
            )
        if len(self._threads) >= self._max_sequences:
            raise InvalidRequestError(
                f"this session has {len(self._threads)} sequences (workflow.settings.max_sequences)",
                code="too_many_sequences",
            )
        policy = self.policies[ask.policy]
        shown = [shown_to_template(message) for message in messages]
        if ask.tools and not policy.chat.lists_tools:
            suffix = describe_tools(list(ask.tools))
            if shown[0]["role"] == "system":
                shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{suffix}"}
            else:
                shown.insert(0, {"role": "system", "content": suffix})
        conversation = Conversation(
            policy,
            shown,
            self._sampling,
            tools=ask.tools if ask.tools and policy.chat.lists_tools else None,
            thinking=self._thinking,
        )
        return Thread(
            policy=ask.policy,
            tools_key=ask.tools_key(),
            conversation=conversation,
            messages=list(messages),
            number=len(siblings),
        )

    async def _speak(self, ask: Ask, thread: Thread, on_token: Callable[[int], None] | None) -> CapturedTurn:
        chat = self.policies[thread.policy].chat
        sampling = self._sampling_of(ask)
        watch = StopWatch(chat, ask.stop, on_token)
        num_prompt_tokens = thread.conversation.num_tokens
        thread.busy = True
        try:
            sampled = await thread.conversation.sample(
                sampling,
                watch=watch.told if ask.stop or on_token is not None else None,
                seed=ask.seed if self._client_sampling else None,
            )
        finally:
            thread.busy = False
        generation = self._as_sampled(watch.finish(sampled), sampling)
        if thread not in self._threads:
            # Others may have begun at the same time: numbered in the order in which they are first answered.
            thread.number = sum(other.policy == thread.policy for other in self._threads)
            self._threads.append(thread)
        thread.conversation.take(generation)
        thread.text = watch.visible(chat.decode(generation.token_ids))
        thread.ended = generation.finish_reason is FinishReason.STOP
        message = answer_message(thread.text, with_calls=ask.read_calls and bool(ask.tools))
        thread.messages.append(plain_message(message, "the answer"))
        self.last = thread
        return CapturedTurn(
            thread=thread,
            message=message,
            generation=generation,
            finish_reason="length" if not thread.ended else "tool_calls" if message.get("tool_calls") else "stop",
            num_prompt_tokens=num_prompt_tokens,
        )

    def _sampling_of(self, ask: Ask) -> Sampling:
        sampling = self._sampling
        if ask.max_tokens is not None:
            budget = min(ask.max_tokens, sampling.max_new_tokens)
            sampling = replace(sampling, max_new_tokens=budget, min_new_tokens=min(budget, sampling.min_new_tokens))
        if self._client_sampling:
            too_low = ask.temperature is not None and ask.temperature < LEAST_TRAINED_TEMPERATURE
            if too_low and self._purpose is Purpose.TRAIN:  # the orchestrator would refuse the whole rollout
                raise InvalidRequestError(
                    f"temperature is {ask.temperature:g}, and greedy tokens cannot be trained: there is no distribution that "
                    f"they were drawn from. Send {LEAST_TRAINED_TEMPERATURE:g} or more, or none to take the run's",
                    param="temperature",
                )
            sampling = replace(
                sampling,
                temperature=sampling.temperature if ask.temperature is None else ask.temperature,
                top_p=sampling.top_p if ask.top_p is None else ask.top_p,
                top_k=sampling.top_k if ask.top_k is None else ask.top_k,
                min_p=sampling.min_p if ask.min_p is None else ask.min_p,
            )
        return sampling

    def _as_sampled(self, generation: Generation, sampling: Sampling) -> Generation:
        """The generation, saying how it was sampled where that is not the run's way."""
        temperature = None if sampling.temperature == self._sampling.temperature else sampling.temperature
        widened = self._sampling.is_truncated and not sampling.is_truncated
        if temperature is None and not widened:
            return generation
        segments = tuple(
            # Widened, the engine told only of the tokens without which `min_new_tokens` left it.
            replace(s, temperature=temperature, kept=(s.kept or pack([WHOLE], s.num_tokens)) if widened else s.kept)
            for s in generation.segments
        )
        return replace(generation, segments=segments)

    # -- what was captured --------------------------------------------------------------------------------------

    def sequences(self, reward: float) -> tuple[TokenSequence, ...]:
        """One per thread, in the order of their first answers; each has the rollout's reward."""
        return tuple(
            thread.conversation.sequence(
                reward=reward,
                stop_reason=StopReason.STOP if thread.ended else StopReason.LENGTH,
                thread=thread.number,
                metrics={"truncated": float(not thread.ended)},
            )
            for thread in self._threads
        )
