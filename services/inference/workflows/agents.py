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

import json
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, Field

from services.common.config.base import Section
from services.common.config.recipe import Recipe
from services.common.errors import (
    ConfigError,
    InfrastructureError,
    InvalidRequestError,
    PromptTooLongError,
    RollmillError,
)
from services.common.importing import check_call, load_object
from services.common.kept_tokens import WHOLE, pack
from services.common.records import (
    LEAST_TRAINED_TEMPERATURE,
    Origin,
    Purpose,
    Sampling,
    Segment,
    StopReason,
    Task,
    TokenSequence,
)
from services.common.telemetry.metrics import RolloutKey
from services.common.text.chat import Chat, Message
from services.common.text.thoughts import END_OF_THOUGHT, THOUGHT, split_thought
from services.common.text.tools import CLOSE, OPEN, MalformedCall, parse_json_call, split_calls
from services.inference.engine.base import FinishReason, Generation
from services.inference.workflows.base import (
    Conversation,
    Outcome,
    PolicyClient,
    WorkflowContext,
    call_reward,
    finite_reward,
)
from services.inference.workflows.tools import describe_tools

# --- The internal form of an external agent's messages and answers, the same for every dialect of requests.


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a tool. ``arguments`` is JSON as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The policy's text of one turn, for agents. ``content`` has the thought, ``said`` has not; neither has the calls."""

    content: str
    said: str
    thought: str = ""
    calls: tuple[Call, ...] = ()

    def message(self) -> Message:
        return assistant_message(self.content, self.calls) | {"said": self.said, "thought": self.thought}


def assistant_message(content: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
    """A plain message of the assistant. Agents keep its text with or without surrounding space, so it has none."""
    told = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls]
    return {"role": "assistant", "content": content.strip(), **({"tool_calls": told} if told else {})}


def apart_message(said: str, thought: str | None, calls: Sequence[Call] = ()) -> dict[str, Any]:
    """A plain message of the assistant from a dialect that has the thought apart; None where the client left it out."""
    said = said.strip()
    content = f"{THOUGHT}\n{thought}\n{END_OF_THOUGHT}\n\n{said}" if thought else said
    return {**assistant_message(content, calls), "said": said, **({} if thought is None else {"thought": thought})}


def written_arguments(arguments: Any) -> str:
    """JSON as text, without spaces; its integers have any size, unlike orjson's."""
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))


def plain_arguments(arguments: str) -> str:
    """The arguments of a call without spaces between their parts, so that spaces make no difference."""
    try:
        return written_arguments(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments  # then compared unchanged


def read_answer(text: str, *, with_calls: bool, thinks: bool) -> Answer:
    """The policy's text as an answer. If a call cannot be parsed, the whole text stays text.

    ``thinks``: the prompt ends within a thought.
    """
    calls: tuple[Call, ...] = ()
    if with_calls:
        without, contents = split_calls(text, thinks=thinks)
        calls = _calls(contents)
        text = without.strip() if calls else text
    thought, said = split_thought(text, thinks=thinks)
    return Answer(content=text, said=said, thought=thought, calls=calls)


def _calls(contents: Sequence[str]) -> tuple[Call, ...]:
    calls = []
    for content in contents:
        parsed = parse_json_call(content)
        if isinstance(parsed, MalformedCall):
            return ()
        try:
            (arguments := written_arguments(parsed.arguments)).encode()
        except UnicodeEncodeError:  # half of a surrogate pair: nothing that clients can read
            return ()
        calls.append(Call(id=f"call_{uuid.uuid4().hex[:24]}", name=parsed.name, arguments=arguments))
    return tuple(calls)


def shown_to_template(message: Message) -> Message:
    """Role and text alone: the calls of an assistant are written into its text, as policies write them."""
    calls = [
        f'{OPEN}\n{{"name": {orjson.dumps(call["name"]).decode()}, "arguments": {call["arguments"]}}}\n{CLOSE}'
        for call in message.get("tool_calls", ())
    ]
    text = "\n".join([message["content"], *calls] if message["content"] else calls) if calls else message["content"]
    return {"role": message["role"], "content": text}


def same_message(ours: Message, theirs: Message) -> bool:
    """Whether a message of a request is one that the session has. A thought that the client left out is no difference."""
    if ours == theirs:
        return True
    if not ours["role"] == theirs["role"] == "assistant" or ours.get("tool_calls") != theirs.get("tool_calls"):
        return False
    if "said" not in theirs:
        return bool(ours["content"] == theirs["content"])
    thought = ours.get("thought")
    return bool(ours.get("said") == theirs["said"] and theirs.get("thought", thought) == thought)


# --- Finds where a new conversation of an agent comes from: which earlier conversation of its rollout, and how.


QUOTED_CHARS = 12
"""Shorter answers stand in other texts by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMark:
    """The end of a turn: the number of messages and of segments up to and with the turn."""

    num_messages: int
    num_segments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """``at``: for a branch, the turn of the parent behind which it goes on."""

    origin: Origin = Origin.ROOT
    parent: Thread | None = None
    at: TurnMark | None = None


def lineage_of(messages: Sequence[Message], tools_key: bytes, threads: Sequence[Thread]) -> Lineage:
    """``threads``: the latest one last."""
    latest_first = threads[::-1]
    shared = [(thread, mark) for thread in latest_first if (mark := _shared_turn(messages, thread))]
    if shared:
        parent, at = max(shared, key=lambda each: each[1].num_messages)
        return Lineage(origin=Origin.BRANCH, parent=parent, at=at)
    quoted = next((thread for thread in latest_first if _quotes(messages, thread)), None)
    if quoted is not None and _frame_of(messages, tools_key) == _frame_of(quoted.messages, quoted.tools_key):
        return Lineage(origin=Origin.COMPACTION, parent=quoted)
    waiting = [thread for thread in latest_first if thread.messages[-1].get("tool_calls")]
    caller = quoted or next((thread for thread in waiting if _asks(thread, messages)), next(iter(waiting), None))
    return Lineage() if caller is None else Lineage(origin=Origin.SUBAGENT, parent=caller)


def _shared_turn(messages: Sequence[Message], thread: Thread) -> TurnMark | None:
    """The last turn of a thread up to which its messages begin ``messages``."""
    found = None
    at = 0
    for mark in thread.marks:
        end = mark.num_messages
        if end > len(messages) or not all(map(same_message, thread.messages[at:end], messages[at:end])):
            break
        found, at = mark, end
    return found


def _quotes(messages: Sequence[Message], thread: Thread) -> bool:
    """Whether messages have an answer of a thread as their own, or its last answer within a text."""
    answers = [thread.messages[mark.num_messages - 1] for mark in thread.marks]
    calls = {call["id"] for answer in answers for call in answer.get("tool_calls", ())}
    for message in messages:
        if message.get("tool_call_id") in calls or any(c["id"] in calls for c in message.get("tool_calls", ())):
            return True
        if message["role"] == "assistant" and any(same_message(answer, message) for answer in answers):
            return True
    said = str(answers[-1].get("said", "")).strip()
    return len(said) >= QUOTED_CHARS and any(said in str(message["content"]) for message in messages)


def _asks(thread: Thread, messages: Sequence[Message]) -> bool:
    """Whether a text among the arguments of a thread's open calls stands in one of the messages."""
    calls = [json.loads(call["arguments"]) for call in thread.messages[-1]["tool_calls"]]
    values = [value for arguments in calls for value in arguments.values() if isinstance(value, str)]
    texts = [str(message["content"]) for message in messages]
    return any(len(value) >= QUOTED_CHARS and any(value.strip() in text for text in texts) for value in values)


def _frame_of(messages: Sequence[Message], tools_key: bytes) -> tuple[bytes, Any]:
    """The tools and the system prompt of a conversation."""
    return tools_key, messages[0]["content"] if messages[0]["role"] == "system" else None


# --- Detects stop texts while a policy generates, and decodes the growing text.


_BYTES_PER_CHARACTER = 4  # of UTF-8 at most, and a token is one byte at least
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # a character whose last bytes have not come yet


class StopWatch:
    """``on_sampled`` is an engine's watch: True when the token completes one of ``stops``. ``on_token`` gets every token."""

    def __init__(self, chat: Chat, stops: Sequence[str], on_token: Callable[[int], None] | None = None) -> None:
        self._chat = chat
        self._stops = tuple(stops)
        self._window = max((_BYTES_PER_CHARACTER * len(stop) for stop in stops), default=0) + 1
        self._on_token = on_token
        self._seen: list[int] = []
        self._stopped_at: int | None = None  # tokens up to and with the one that completed a stop

    def on_sampled(self, token: int) -> bool:
        if self._stopped_at is not None:
            return True
        self._seen.append(token)
        if self._on_token is not None:
            self._on_token(token)
        if self._stops:
            tail = self._chat.decode(self._seen[-self._window :])
            if any(stop in tail for stop in self._stops):
                self._stopped_at = len(self._seen)
        return self._stopped_at is not None

    def finish(self, generation: Generation) -> Generation:
        """Process the tokens that the engine did not report; cut the generation behind the token that completed a stop.

        The kept tokens were drawn independently of the later ones, so their log-probabilities stay valid.
        """
        if not self._stops and self._on_token is None:
            return generation
        for token in generation.token_ids[len(self._seen) :]:
            if self.on_sampled(token):
                break
        if self._stopped_at is None:
            return generation
        return Generation(
            segments=_first_tokens(generation.segments, self._stopped_at), finish_reason=FinishReason.STOP
        )

    def stop_in(self, text: str) -> str | None:
        """The first stop in a text."""
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None


class IncrementalText:
    """Decodes a growing list of tokens; the cost per token does not grow with the length."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._ids: list[int] = []
        self._begin = 0  # the piece that is decoded again; a decoder may need the tokens before
        self._read = 0
        self.text = ""

    def add(self, token: int) -> None:
        self._ids.append(token)
        before = self._chat.decode(self._ids[self._begin : self._read])
        now = self._chat.decode(self._ids[self._begin :])
        if len(now) > len(before) and not now.endswith(_BROKEN):
            self.text += now[len(before) :]
            self._begin, self._read = self._read, len(self._ids)


def settled(text: str, endings: Sequence[str]) -> str:
    """The text before the first of ``endings``, without a tail that may be the beginning of an ending.

    >>> settled("I say <tool", ["<tool_call>"]), settled("a<tool_call>b", ["<tool_call>"])
    ('I say ', 'a')
    """
    for ending in endings:
        text = text.partition(ending)[0]
    held = max(
        (size for ending in endings for size in range(1, len(ending)) if text.endswith(ending[:size])), default=0
    )
    return text[: len(text) - held]


def _first_tokens(segments: Sequence[Segment], num_tokens: int) -> tuple[Segment, ...]:
    kept: list[Segment] = []
    for segment in segments:
        size = min(segment.num_tokens, num_tokens)
        if not size:
            break
        num_tokens -= size
        kept.append(segment.head(size))
    return tuple(kept)


# --- Types of captured conversations: a request for a turn, a thread that grows, and the turn that answers.


DEFAULT_MODEL = "default"  # the name under which a request asks for the session's own policy


class TurnRequest(BaseModel):
    """One request for a turn, without its messages. A field that is None has the run's value."""

    policy: str = ""
    tools: list[dict[str, Any]] = Field(default=[], max_length=512)
    tool_choice: Literal["auto", "none"] = "auto"
    stop: list[str] = []
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)  # 0 and -1 are off; a field of Anthropic's alone
    min_p: float | None = Field(default=None, ge=0, lt=1)  # a field of none
    seed: int | None = None

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def tools_key(self) -> bytes:
        return orjson.dumps(self.tools, option=orjson.OPT_SORT_KEYS) if self.tools else b""


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
    def parent(self) -> Thread | None:
        return self.lineage.parent


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


_SHOWN = ("role", "content", "tool_calls", "tool_call_id")  # of a message, to functions that compute rewards


class SessionSettings(Section):
    policy: str | None = None
    """The policy behind the model `default`; left out, the only policy of the recipe."""
    rewrites: Literal["new_sequence", "refuse"] = "new_sequence"
    """A request that does not extend an earlier one, word for word, begins another sequence of the trajectory, or is
    refused."""
    client_sampling: bool = False
    """Whether temperature, top_p, top_k, min_p and seed of requests count, instead of the recipe's `sampling`. Each turn is then
    trained at the temperature and over the tokens of its sampling; temperature 0 is refused, except in evaluation."""
    max_sequences: int = Field(default=64, ge=1)
    """Most sequences of one trajectory; a request that would begin another is refused."""
    thinking: bool | None = None
    """Turn the thinking of the chat template on or off, if supported (Qwen3); left out, the template's default."""


class CapturedSession:
    """The policies of one rollout for an external agent, with any number of concurrent requests."""

    def __init__(
        self,
        policies: Mapping[str, PolicyClient],
        sampling: Sampling,
        settings: SessionSettings,
        purpose: Purpose = Purpose.TRAIN,
    ) -> None:
        self.policies = policies
        self.default_policy = settings.policy or (next(iter(policies)) if len(policies) == 1 else None)
        self.failure: RollmillError | None = None  # of the infrastructure; an agent may have swallowed the error
        self.last: Thread | None = None
        self.reward: float | None = None  # that the agent told for the whole rollout
        self._sampling = sampling
        self._settings = settings
        self._purpose = purpose
        self._threads: list[Thread] = []  # in the order of their first answers
        self._by_last_turn: dict[Thread, None] = {}

    # -- asking -------------------------------------------------------------------------------------------------

    def locate(self, ask: TurnRequest, messages: Sequence[Message]) -> Located:
        """The longest thread whose messages are a proper prefix of ``messages``."""
        tools_key = ask.tools_key()
        found = None
        for thread in self._threads:
            length = len(thread.messages)
            if (
                length < len(messages)
                and not thread.busy
                and (thread.policy, thread.tools_key) == (ask.policy, tools_key)
                and (found is None or length > len(found.messages))
                and all(map(same_message, thread.messages, messages))
            ):
                found = thread
        return found, messages[len(found.messages) if found else 0 :]

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
                del thread.messages[len(thread.messages) - len(new) :]
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
        if siblings and self._settings.rewrites == "refuse":
            raise InvalidRequestError(
                "the messages do not extend the conversation of this session, word for word, and "
                "workflow.settings.rewrites is `refuse`",
                code="history_rewritten",
            )
        if len(self._threads) >= self._settings.max_sequences:
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
        if parent is None or at is None or (parent.policy, parent.tools_key) != (ask.policy, ask.tools_key()):
            return None
        new = messages[at.num_messages :]
        if any(message["role"] == "assistant" for message in new):
            return None
        forked = parent.conversation.fork(at.num_segments, *map(shown_to_template, new))
        if forked is None:
            raise PromptTooLongError("the history of these messages, and the messages, fill the context")
        return forked

    def _prompted(self, ask: TurnRequest, messages: Sequence[Message]) -> Conversation:
        """A conversation from messages as its prompt."""
        policy = self.policies[ask.policy]
        shown = [shown_to_template(message) for message in messages]
        if ask.tools and not policy.chat.lists_tools:
            suffix = describe_tools(ask.tools)
            if shown[0]["role"] == "system":
                shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{suffix}"}
            else:
                shown.insert(0, {"role": "system", "content": suffix})
        return Conversation(
            policy,
            shown,
            self._sampling,
            tools=ask.tools if ask.tools and policy.chat.lists_tools else None,
            thinking=self._settings.thinking,
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
                seed=ask.seed if self._settings.client_sampling else None,
            )
        finally:
            thread.busy = False
        generation = self._as_sampled(watch.finish(sampled), sampling)
        if thread not in self._threads:
            # Concurrent threads are numbered in the order of their first answers.
            thread.number = sum(other.policy == thread.policy for other in self._threads)
            self._threads.append(thread)
        text = chat.decode(thread.conversation.take(generation))
        stop = watch.stop_in(text)
        thread.text = text if stop is None else text.partition(stop)[0]
        thread.ended = generation.finish_reason is FinishReason.STOP
        answer = read_answer(thread.text, with_calls=ask.reads_calls, thinks=self.thinks(thread.policy))
        thread.messages.append(answer.message())
        thread.marks.append(TurnMark(num_messages=len(thread.messages), num_segments=thread.conversation.num_segments))
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
            num_messages=len(thread.messages),
        )

    def thinks(self, policy: str) -> bool:
        """Whether the chat template begins this policy's turns within a thought."""
        return self.policies[policy].chat.with_thinking(self._settings.thinking).thinks

    def _sampling_of(self, ask: TurnRequest) -> Sampling:
        sampling = self._sampling
        if ask.max_tokens is not None:
            budget = min(ask.max_tokens, sampling.max_new_tokens)
            sampling = replace(sampling, max_new_tokens=budget, min_new_tokens=min(budget, sampling.min_new_tokens))
        if self._settings.client_sampling:
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
                top_k=sampling.top_k if ask.top_k is None else max(0, ask.top_k),
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


# --- Rewards of an agent's conversations by a function of the user that reads all of them.


# The reward of the rollout, and one for each conversation: None where the function returned one number for all.
ConversationGrader = Callable[[Task, Sequence[Mapping[str, Any]]], Awaitable[tuple[float, tuple[float, ...] | None]]]


def conversation_grader(reward: str) -> ConversationGrader:
    """The grader of a function's import path. Raises ``ConfigError`` for one that cannot be called so."""
    function = load_object(reward)
    check_call(function, reward, "def reward(task, conversations) -> float | list[float]", "task", "conversations")

    async def grade(task: Task, conversations: Sequence[Mapping[str, Any]]) -> tuple[float, tuple[float, ...] | None]:
        given = await call_reward(function, reward, task, conversations)
        where = f"task {task.task_id}"
        if not isinstance(given, (list, tuple)):
            return finite_reward(given, reward, where), None
        if len(given) != len(conversations):
            raise ValueError(
                f"reward {reward} returned {len(given)} numbers for {len(conversations)} conversations of {where}; return one "
                "number for each, or a single number"
            )
        each = tuple(finite_reward(one, reward, f"conversation {i} of {where}") for i, one in enumerate(given))
        return sum(each) / len(each), each

    return grade


# --- Plays a rollout through a session of the endpoint: settings, the block in which the session is served, the outcome.


Given = TypeVar("Given")


def check_endpoint(recipe: Recipe, who: str) -> None:
    """Check that a recipe's replicas have an endpoint; ``ConfigError`` names the remedy."""
    for name, service in recipe.inference.items():
        if service.endpoint.port is None:
            raise ConfigError(
                f"inference.{name}.endpoint.port is null, and {who} reach the policies "
                "through the endpoint: write a port there, or 0 for a free one"
            )


async def in_session(
    settings: SessionSettings, context: WorkflowContext, play: Callable[[str, str], Awaitable[Given]]
) -> tuple[CapturedSession, Given]:
    """The result of ``play(base_url, session id)``, and the session with the tokens that its requests sampled.

    Raises the infrastructure failure of the session's requests if there is one; else the errors of ``play``.
    """
    if context.endpoint is None:
        raise ConfigError("this workflow needs the endpoint: write a port at inference.<name>.endpoint.port")
    session = CapturedSession(context.policies, context.sampling, settings, context.purpose)
    try:
        with context.endpoint.opened(session) as session_id:
            given = await play(context.endpoint.base_url, session_id)
    except Exception:  # an infrastructure failure explains the agent's error
        if session.failure is not None:
            raise session.failure from None
        raise
    if session.failure is not None:
        raise session.failure
    return session, given


def captured_outcome(session: CapturedSession, reward: float, metrics: Mapping[str, float]) -> Outcome:
    """The record of a rollout with its reward, its metrics, and how many sequences came from others."""
    sequences = session.sequences(reward)
    origins = Counter(f"sequences_{each.origin}" for each in sequences if each.parent is not None)
    counted = {name: float(count) for name, count in origins.items()}
    return Outcome(sequences=sequences, reward=reward, metrics={**metrics, **counted})
