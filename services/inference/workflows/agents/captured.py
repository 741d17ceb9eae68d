"""Captures the conversations of an external agent in one rollout as token sequences, exactly as sampled.

    request's messages --extend a thread--> its sampled ids + ids of the new messages --> policy --> answer
                       |-repeat its beginning--> another thread, from the ids of that beginning (or refused)
                       '-other messages--------> another thread, from the messages as a prompt (or refused)

Agents send their whole conversation with every request, as text. A ``Thread`` keeps the messages beside their ids: a
request that repeats the messages, the policy's own answer included, continues from the ids, and no text is tokenised twice.
Each thread is a sequence of the trajectory with a parent (``lineage``); only the tokens that were sampled in it are trained
in it. Independent of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from services.common.errors import InfrastructureError, InvalidRequestError, PromptTooLongError, RollmillError
from services.common.records.kept_tokens import WHOLE, pack
from services.common.records.types import LEAST_TRAINED_TEMPERATURE, Purpose, Sampling, StopReason
from services.common.records.types import Sequence as TokenSequence
from services.common.telemetry.metrics import RolloutKey
from services.common.text.chat import Message
from services.inference.engine.base import FinishReason, Generation
from services.inference.workflows.agents.chat_messages import read_answer, same_messages, shown_to_template
from services.inference.workflows.agents.lineage import Lineage, TurnMark, lineage_of
from services.inference.workflows.agents.stop_text import StopWatch
from services.inference.workflows.agents.turns import CapturedTurn, Located, Thread, TurnRequest
from services.inference.workflows.base import PolicyClient
from services.inference.workflows.conversation import Conversation
from services.inference.workflows.tools.tool_use import describe_tools

Rewrites = Literal["new_sequence", "refuse"]

_SHOWN = ("role", "content", "tool_calls", "tool_call_id")  # of a message, to functions that compute rewards


class CapturedSession:
    """The policies of one rollout for an external agent, with any number of concurrent requests."""

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
        """``client_sampling``: the requests' temperature, top_p, top_k, min_p and seed replace the run's. Each captured turn
        then has its sampling parameters, and is trained under them."""
        self.policies = policies
        self.default_policy = default_policy or (next(iter(policies)) if len(policies) == 1 else None)
        self.failure: RollmillError | None = None  # of the infrastructure; an agent may have swallowed the error
        self.last: Thread | None = None
        self.reward: float | None = None  # that the agent told for the whole rollout
        self._sampling = sampling
        self._rewrites = rewrites
        self._client_sampling = client_sampling
        self._max_sequences = max_sequences
        self._thinking = thinking
        self._purpose = purpose
        self._threads: list[Thread] = []  # in the order of their first answers
        self._by_last_turn: dict[Thread, None] = {}

    # -- asking -------------------------------------------------------------------------------------------------

    def locate(self, ask: TurnRequest, messages: Sequence[Message]) -> Located:
        """The longest thread whose messages are a proper prefix of ``messages``."""
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
        self, ask: TurnRequest, locate: Callable[[], Located], on_token: Callable[[int], None] | None = None
    ) -> CapturedTurn:
        """Answer the result of ``locate``: the thread that a request extends and its new plain messages, or None and all
        messages. ``locate`` is called when the turn begins, because threads grow meanwhile.

        After a cancellation or a failure the state is unchanged. Raises ``InvalidRequestError`` and ``PromptTooLongError``
        for errors of the agent, ``InfrastructureError`` for others.
        """
        thread, new = _answerable(locate())
        try:
            if thread is None:
                return await self._sample(ask, self._begin(ask, new), on_token)
            if not thread.conversation.add(*map(shown_to_template, new)):
                raise PromptTooLongError(f"{thread.conversation.num_tokens} tokens and these messages fill the context")
            thread.messages += new
            try:
                return await self._sample(ask, thread, on_token)
            except BaseException:  # cancelled, too: the client left
                del thread.messages[thread.num_messages - len(new) :]
                thread.conversation.take_back()
                raise
        except InfrastructureError as error:
            self.failure = self.failure or error
            raise

    def count(self, ask: TurnRequest, locate: Callable[[], Located]) -> int:
        """The tokens of the prompt that ``take_turn`` would read with the same arguments."""
        thread, new = _answerable(locate())
        if thread is None:
            return self._begin(ask, new).conversation.num_tokens
        return thread.conversation.num_tokens_with(*map(shown_to_template, new))

    def _begin(self, ask: TurnRequest, messages: Sequence[Message]) -> Thread:
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
        number, tools_key = len(siblings), ask.tools_key()
        lineage = lineage_of(messages, tools_key, tuple(self._by_last_turn))
        thread = Thread(
            policy=ask.policy,
            tools_key=tools_key,
            conversation=self._forked(ask, messages, lineage) or self._prompted(ask, messages),
            messages=list(messages),
            number=number,
            lineage=lineage,
        )
        return thread

    def _forked(self, ask: TurnRequest, messages: Sequence[Message], lineage: Lineage) -> Conversation | None:
        """A conversation from the ids of its parent, if that has the same prompt and what follows is no turn of the policy."""
        parent, at = lineage.parent, lineage.at
        if at is None or (parent.policy, parent.tools_key) != (ask.policy, ask.tools_key()):
            return None
        new = messages[at.num_messages :]
        if any(message["role"] == "assistant" for message in new):
            return None
        forked: Conversation | None = parent.conversation.fork(at.num_segments, *map(shown_to_template, new))
        if forked is None:
            raise PromptTooLongError("the history of these messages, and the messages, fill the context")
        return forked

    def _prompted(self, ask: TurnRequest, messages: Sequence[Message]) -> Conversation:
        """A conversation from messages as its prompt."""
        policy = self.policies[ask.policy]
        shown = [shown_to_template(message) for message in messages]
        if ask.tools and not policy.chat.lists_tools:
            suffix = describe_tools(list(ask.tools))
            if shown[0]["role"] == "system":
                shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{suffix}"}
            else:
                shown.insert(0, {"role": "system", "content": suffix})
        return Conversation(
            policy,
            shown,
            self._sampling,
            tools=ask.tools if ask.tools and policy.chat.lists_tools else None,
            thinking=self._thinking,
        )

    async def _sample(self, ask: TurnRequest, thread: Thread, on_token: Callable[[int], None] | None) -> CapturedTurn:
        chat = self.policies[thread.policy].chat
        sampling = self._sampling_of(ask)
        watch = StopWatch(chat, ask.stop, on_token)
        num_prompt_tokens = thread.conversation.num_tokens
        thread.busy = True
        try:
            sampled = await thread.conversation.sample(
                sampling,
                watch=watch.on_sampled if ask.stop or on_token is not None else None,
                seed=ask.seed if self._client_sampling else None,
            )
        finally:
            thread.busy = False
        generation = self._as_sampled(watch.finish(sampled), sampling)
        if thread not in self._threads:
            # Concurrent threads are numbered in the order of their first answers.
            thread.number = sum(other.policy == thread.policy for other in self._threads)
            self._threads.append(thread)
        thread.conversation.take(generation)
        text = chat.decode(generation.token_ids)
        stop = watch.stop_in(text)
        thread.text = text if stop is None else text.partition(stop)[0]
        thread.ended = generation.finish_reason is FinishReason.STOP
        answer = read_answer(
            thread.text, with_calls=ask.read_calls and bool(ask.tools), thinks=self.thinks(thread.policy)
        )
        thread.messages.append(answer.message())
        thread.marks.append(TurnMark(num_messages=thread.num_messages, num_segments=thread.conversation.num_segments))
        self._by_last_turn.pop(thread, None)
        self._by_last_turn[thread] = None
        self.last = thread
        return CapturedTurn(
            thread=thread,
            answer=answer,
            generation=generation,
            ended=thread.ended,
            stop=stop,
            num_prompt_tokens=num_prompt_tokens,
            num_messages=thread.num_messages,
        )

    def thinks(self, policy: str) -> bool:
        """Whether the chat template begins this policy's turns within a thought."""
        return self.policies[policy].chat.with_thinking(self._thinking).thinks

    def _sampling_of(self, ask: TurnRequest) -> Sampling:
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
        """The generation, with its sampling parameters if they differ from the run's."""
        temperature = None if sampling.temperature == self._sampling.temperature else sampling.temperature
        widened = self._sampling.is_truncated and not sampling.is_truncated
        if temperature is None and not widened:
            return generation
        segments = tuple(
            # Widened: the engine reported only the tokens that `min_new_tokens` had excluded.
            replace(s, temperature=temperature, kept=(s.kept or pack([WHOLE], s.num_tokens)) if widened else s.kept)
            for s in generation.segments
        )
        return replace(generation, segments=segments)

    # -- captured sequences -------------------------------------------------------------------------------------

    def conversations(self) -> list[dict[str, Any]]:
        """One per thread, in the order of ``sequences``, for functions that compute rewards."""
        position = {thread: i for i, thread in enumerate(self._threads)}
        return [
            {
                "policy": thread.policy,
                "origin": thread.lineage.origin.value,
                "parent": None if thread.parent is None else position[thread.parent],
                "messages": [{k: m[k] for k in _SHOWN if k in m} for m in thread.messages],
            }
            for thread in self._threads
        ]

    def reward_each(self, rewards: Sequence[float]) -> None:
        """Give each thread a reward of its own, in the order of ``sequences``."""
        for thread, reward in zip(self._threads, rewards, strict=True):
            thread.reward = reward

    def sequences(self, reward: float) -> tuple[TokenSequence, ...]:
        """One per thread, in the order of their first answers, so that a parent comes before its children. Each has the
        rollout's reward, if it was given none of its own."""
        position = {thread: i for i, thread in enumerate(self._threads)}
        return tuple(
            thread.conversation.sequence(
                reward=reward if thread.reward is None else thread.reward,
                stop_reason=StopReason.STOP if thread.ended else StopReason.LENGTH,
                thread=thread.number,
                parent=None if thread.parent is None else position[thread.parent],
                origin=thread.lineage.origin,
                metrics={RolloutKey.TRUNCATED.value: float(not thread.ended)},
            )
            for thread in self._threads
        )


def _answerable(located: Located) -> Located:
    thread, new = located
    if not new or new[-1]["role"] == "assistant":
        raise InvalidRequestError("messages must end with a message to answer, not with an assistant message")
    return thread, new
