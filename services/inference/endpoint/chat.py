"""OpenAI's chat completions."""

from __future__ import annotations

import enum
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import orjson
import structlog
from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator

from services.common.errors import (
    CapacityError,
    InfrastructureError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    PromptTooLongError,
    RollmillError,
    UnauthenticatedError,
    UnknownPolicyError,
)
from services.common.importing import place_of_error, told
from services.common.text.chat import Chat, Message, joined_parts
from services.common.text.thoughts import END_OF_THOUGHT, THOUGHT
from services.common.text.tools import cut_text
from services.inference.workflows.agents import (
    DEFAULT_MODEL,
    Answer,
    Call,
    CapturedTurn,
    TurnRequest,
    assistant_message,
    plain_arguments,
    settled,
    tool_message,
)

# --- Validates the tools of a request, and converts them into the form that chat templates list: OpenAI's chat functions.


_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}
_DEPTH = 32


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as templates list it. Fields that are None are left out."""
    told = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
    """Raise ``ValueError`` for a tool that is no function, has no name, twice the same, or an invalid schema."""
    names = set()
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise ValueError(
                f"tool {i} is of type {tool.get('type')!r}; only functions can be called here: turn this tool off in the "
                "agent"
            )
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"tool {i} has no name")
        if name in names:
            raise ValueError(f"two tools have the name {name!r}")
        names.add(name)
        if (schema := function.get("parameters")) is not None:
            check_schema(schema, f"the parameters of {name!r}", 0)
            if isinstance(schema, Mapping) and schema and schema.get("type", "object") != "object":
                raise ValueError(f"the parameters of {name!r} are of type {schema['type']!r}; must be 'object'")
    return tools


Tools = Annotated[list[dict[str, Any]] | None, AfterValidator(check_tools)]


def check_schema(schema: Any, where: str, depth: int) -> None:
    """Raise ``ValueError`` for what is no JSON Schema. Keywords that are not known are left to the agent."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where} are no JSON Schema but {type(schema).__name__}; write an object")
    if depth > _DEPTH:
        raise ValueError(f"{where} are nested more than {_DEPTH} deep")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise ValueError(f"{where} have the type {kind!r}; there is {', '.join(sorted(_TYPES))}")
    properties = {} if schema.get("properties") is None else schema["properties"]
    if not isinstance(properties, Mapping):
        raise ValueError(f"{where}.properties must be an object, not {type(properties).__name__}")
    required = [] if schema.get("required") is None else schema["required"]
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"{where}.required must be a list of names")
    if "enum" in schema and not isinstance(schema["enum"], list):
        raise ValueError(f"{where}.enum must be a list of values")
    for name, inner in properties.items():
        check_schema(inner, f"{where}.{name}", depth + 1)
    if isinstance(items := schema.get("items"), Mapping):
        check_schema(items, f"{where}.items", depth + 1)
    for keyword in ("anyOf", "allOf", "oneOf"):
        options = schema.get(keyword, [])
        if not isinstance(options, list):
            raise ValueError(f"{where}.{keyword} must be a list of schemas")
        for i, inner in enumerate(options):
            check_schema(inner, f"{where}.{keyword}[{i}]", depth + 1)


# --- Defines a dialect of the endpoint: it reads requests, and writes answers, events and errors.


log = structlog.get_logger(__name__)
Fields = TypeVar("Fields", bound=BaseModel)


class UnknownSessionError(NotFoundError):
    """No rollout has this session, or its rollout is over."""


class DialectRequest(BaseModel, ABC):
    """All fields of a request but its items (messages, input).

    Fields without effect here (``user``, ``metadata``, ``store``, ...) are ignored; fields that request an unsupported
    feature are refused by name, so that no run trains under settings that were not requested.
    """

    model: str = DEFAULT_MODEL
    stream: bool | None = None
    tools: Tools = Field(default=None, max_length=512)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)  # 0 and -1 are off; a field of Anthropic's alone
    min_p: float | None = Field(default=None, ge=0, lt=1)  # a field of none

    def preface(self) -> list[Message]:
        """Messages before the items, such as a system prompt in a field of its own."""
        return []

    def previous(self) -> str | None:
        """The id of an answer after whose conversation the items follow."""
        return None

    @abstractmethod
    def ask(self, policy: str) -> TurnRequest: ...

    def _ask(self, policy: str, **fields: Any) -> TurnRequest:
        return TurnRequest(
            policy=policy,
            tools=self.tools or (),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            **fields,
        )


class AnswerWriter(ABC):
    """Writes one answer: ``whole``, or ``begin``, any number of ``text``, then ``finish`` or ``fail``."""

    prefix = "answer"

    def __init__(self, request: Any, policy: str, chat: Chat, *, thinks: bool) -> None:
        """``thinks``: the policy's text begins within a thought."""
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self.request = request
        self.policy = policy
        self.chat = chat
        self.thinks = thinks

    @abstractmethod
    def whole(self, turn: CapturedTurn) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def begin(self) -> Iterable[bytes]:
        """Events before the first token."""

    @abstractmethod
    def text(self, settled: str) -> Iterable[bytes]:
        """Events of the text so far, which only grows, and is no part of a call or a stop."""

    @abstractmethod
    def finish(self, turn: CapturedTurn) -> Iterable[bytes]:
        """Events of all that was not sent, and of the end."""

    def stored(self) -> dict[str, Any] | None:
        """The body that the client may fetch by its id, once the answer is written; None for one that is not kept."""
        return None

    @abstractmethod
    def fail(self, error: RollmillError) -> Iterable[bytes]:
        """Events of a turn that failed after the first event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLimits:
    """Bounds of what a request's items hold."""

    tool_result_chars: int

    def tool_result(self, text: str) -> str:
        return cut_text(text, self.tool_result_chars)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error for a client: only transient errors have a status that clients retry."""

    status: int
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dialect:
    """``items`` names the field with the list that grows with a conversation; ``counts``: the path, behind the dialect's,
    that counts tokens, and ``counted`` the body of its answer."""

    path: str
    items: str
    request: type[DialectRequest]
    read_items: Callable[[Sequence[Any], ItemLimits], list[Message]]
    writer: type[AnswerWriter]
    refusal: Callable[[Refusal], tuple[int, dict[str, Any]]]
    counts: str | None = None
    counted: Callable[[int], dict[str, Any]] = lambda count: {"input_tokens": count}

    def refused(self, error: Exception) -> tuple[int, dict[str, Any]]:
        """Status and body of an error."""
        return self.refusal(refusal_of(known(error)))


def validated(kind: type[Fields], given: Any) -> Fields:
    """Raises ``InvalidRequestError``, which names the first wrong field."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidRequestError(f"{where}: {first['msg']}", param=where) from None


def refusal_of(error: RollmillError) -> Refusal:
    status, code = 500, error.reason.lower()
    if isinstance(error, UnknownSessionError):
        status, code = 401, "unknown_session"
    elif isinstance(error, UnauthenticatedError):
        status = 401
    elif isinstance(error, PermissionDeniedError):
        status = 403
    elif isinstance(error, UnknownPolicyError):
        status, code = 404, "model_not_found"
    elif isinstance(error, NotFoundError):
        status = 404
    elif isinstance(error, PromptTooLongError):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, InvalidRequestError):
        status = 400
    elif isinstance(error, (CapacityError, InfrastructureError)):
        status = 503
    return Refusal(
        status=status, code=error.metadata.get("code", code), message=error.message, param=error.metadata.get("param")
    )


def known(error: Exception) -> RollmillError:
    """The error as the agent is told of it: one of the user's code, such as a script, with its place."""
    if isinstance(error, RollmillError):
        return error
    log.error("endpoint.failed", exc_info=error)
    return RollmillError(f"{place_of_error(error)}{told(error)}")


def check_stops(stops: Sequence[str]) -> list[str]:
    """For validators. Raises ``ValueError``."""
    if len(stops) > 16 or any(not 0 < len(stop) <= 256 for stop in stops):
        raise ValueError("at most 16 texts of 1 to 256 characters")
    return list(stops)


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


def object_at(value: Any, where: str) -> Mapping[str, Any]:
    """``value``, which must be an object. Raises ``InvalidRequestError``."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where} must be an object")
    return value


_ROLES = {"developer": "system"}  # the name in newer clients
_KNOWN = ("system", "user", "assistant", "tool")


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(DialectRequest):
    tool_choice: Literal["auto", "none"] | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    n: Literal[1] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    repetition_penalty: Literal[1] | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=0)
    response_format: dict[str, Any] | None = None
    functions: None = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> list[str]:
        return check_stops([value] if isinstance(value, str) else list(value or ()))

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "text":
            raise ValueError("answers are text; write {'type': 'text'} or remove the field")
        return value

    def ask(self, policy: str) -> TurnRequest:
        return self._ask(
            policy,
            read_calls=self.tool_choice != "none",
            stop=tuple(self.stop or ()),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
        )


# -- messages -------------------------------------------------------------------------------------------------------


def read_messages(messages: Sequence[Any], limits: ItemLimits) -> list[Message]:
    return [_plain(message, f"messages[{i}]", limits) for i, message in enumerate(messages)]


def _plain(message: Any, where: str, limits: ItemLimits) -> Message:
    message = object_at(message, where)
    role = _ROLES.get(str(message.get("role")), message.get("role"))
    if role not in _KNOWN:
        raise InvalidRequestError(f"{where}.role is {role!r}; must be one of {', '.join(_KNOWN)}")
    content = text_of(message.get("content"), f"{where}.content")
    if role == "assistant":
        told = message.get("tool_calls") or []
        if not isinstance(told, list):
            raise InvalidRequestError(f"{where}.tool_calls must be a list")
        return assistant_message(content, [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(told)])
    if role == "tool":
        return tool_message(str(message.get("tool_call_id", "")), limits.tool_result(content))
    return {"role": role, "content": content}


def text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else joined_parts(content, where)


def _call(call: Any, where: str) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} needs function.name and function.arguments")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        raise InvalidRequestError(f"{where}.function.arguments must be JSON as text")
    return Call(id=str(call.get("id", "")), name=function["name"], arguments=plain_arguments(arguments))


# -- answers --------------------------------------------------------------------------------------------------------


class ChatWriter(AnswerWriter):
    """The thought stays in the text of an answer: clients of chat completions read and return one text."""

    prefix = "chatcmpl-"
    request: ChatRequest

    def __init__(self, request: ChatRequest, policy: str, chat: Chat, *, thinks: bool) -> None:
        super().__init__(request, policy, chat, thinks=thinks)
        self._created = int(time.time())
        self._sent = ""

    def whole(self, turn: CapturedTurn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": turn.answer.content}
        if turn.answer.calls:
            message |= {"content": turn.answer.content or None, "tool_calls": _told_calls(turn)}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _finish_reason(turn),
            "logprobs": self._logprobs(turn),
        }
        return {**self._fields("chat.completion"), "choices": [choice], "usage": _usage(turn)}

    def begin(self) -> Iterable[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    def text(self, settled: str) -> Iterable[bytes]:
        if len(settled) > len(self._sent):
            yield self._chunk({"content": settled[len(self._sent) :]})
            self._sent = settled

    def finish(self, turn: CapturedTurn) -> Iterable[bytes]:
        content = turn.answer.content
        # With calls, space at the end of the text may have been sent before the cut was known.
        if content.startswith(self._sent):
            yield from self.text(content)
        if turn.answer.calls:
            yield self._chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(_told_calls(turn))]})
        yield self._chunk({}, finish_reason=_finish_reason(turn), logprobs=self._logprobs(turn))
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield event({**self._fields("chat.completion.chunk"), "choices": [], "usage": _usage(turn)})
        yield b"data: [DONE]\n\n"

    def fail(self, error: RollmillError) -> Iterable[bytes]:
        yield event(CHAT.refused(error)[1])
        yield b"data: [DONE]\n\n"

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.policy}

    def _chunk(self, delta: Mapping[str, Any], **choice: Any) -> bytes:
        one = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **choice}
        return event({**self._fields("chat.completion.chunk"), "choices": [one]})

    def _logprobs(self, turn: CapturedTurn) -> dict[str, Any] | None:
        """Log-probabilities of every sampled token under its sampling distribution."""
        if not self.request.logprobs:
            return None
        entries = []
        for segment in turn.generation.segments:
            for token, value in zip(segment.token_ids.tolist(), segment.logprobs.tolist(), strict=True):
                text = self.chat.decode([token])
                entries.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": entries, "refusal": None}


def _told_calls(turn: CapturedTurn) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.answer.calls
    ]


def _finish_reason(turn: CapturedTurn) -> str:
    return "length" if not turn.ended else "tool_calls" if turn.answer.calls else "stop"


def _usage(turn: CapturedTurn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.num_prompt_tokens,
        "completion_tokens": turn.num_sampled_tokens,
        "total_tokens": turn.num_prompt_tokens + turn.num_sampled_tokens,
    }


def openai_refusal(refusal: Refusal) -> tuple[int, dict[str, Any]]:
    """An error for OpenAI's clients."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    told = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}
    return refusal.status, {"error": told}


CHAT = Dialect(
    path="/chat/completions",
    items="messages",
    request=ChatRequest,
    read_items=read_messages,
    writer=ChatWriter,
    refusal=openai_refusal,
)


# --- Writes an answer as blocks, one after the other: the thought, the text, the calls of tools.


class Kind(enum.Enum):
    THOUGHT = enum.auto()
    TEXT = enum.auto()


def texts_of(answer: Answer) -> Iterator[tuple[Kind, str]]:
    """The blocks of an answer before its calls. An answer of nothing is one empty text, which clients can return."""
    if answer.thought:
        yield Kind.THOUGHT, answer.thought
    if answer.said or not (answer.thought or answer.calls):
        yield Kind.TEXT, answer.said


def split_growing(text: str, *, thinks: bool) -> tuple[str, str]:
    """Thought and text of an answer that still grows, without what may turn out to be a tag or space at an end.

    >>> split_growing("<thi", thinks=False), split_growing("<think>a b </th", thinks=False)
    (('', ''), ('a b', ''))
    """
    begun = text.lstrip()
    if not thinks and THOUGHT.startswith(begun[: len(THOUGHT)]) and len(begun) < len(THOUGHT):
        return "", ""
    if not thinks and not begun.startswith(THOUGHT):
        return "", text.strip()
    if thinks and THOUGHT.startswith(begun) and len(begun) < len(THOUGHT):
        return "", ""  # a template that opens the thought, and a policy that opens it again
    thought, ended, said = begun.removeprefix(THOUGHT).partition(END_OF_THOUGHT)
    return (thought if ended else settled(thought, [END_OF_THOUGHT])).strip(), said.strip()


class BlockWriter(AnswerWriter):
    def __init__(self, request: DialectRequest, policy: str, chat: Chat, *, thinks: bool) -> None:
        super().__init__(request, policy, chat, thinks=thinks)
        self.num_blocks = 0
        self._open: Kind | None = None
        self._sent = {Kind.THOUGHT: "", Kind.TEXT: ""}

    def text(self, settled: str) -> Iterable[bytes]:
        thought, said = split_growing(settled, thinks=self.thinks)
        yield from self._grow(Kind.THOUGHT, thought)
        yield from self._grow(Kind.TEXT, said)

    def finish(self, turn: CapturedTurn) -> Iterable[bytes]:
        for kind, text in texts_of(turn.answer):
            if not text and not self.num_blocks:
                yield from self._begin_block(kind)
            yield from self._grow(kind, text)
        yield from self._end_block()
        for call in turn.answer.calls:
            yield from self.write_call(call)
            self.num_blocks += 1
        yield from self.end(turn)

    def _grow(self, kind: Kind, text: str) -> Iterable[bytes]:
        sent = self._sent[kind]
        if len(text) <= len(sent) or not text.startswith(sent):
            return
        if self._open is not kind:
            yield from self._end_block()
            yield from self._begin_block(kind)
        self._sent[kind] = text
        yield from self.write_delta(kind, text[len(sent) :])

    def _begin_block(self, kind: Kind) -> Iterable[bytes]:
        self._open = kind
        yield from self.begin_block(kind)

    def _end_block(self) -> Iterable[bytes]:
        if self._open is not None:
            yield from self.end_block(self._open, self._sent[self._open])
            self._open = None
            self.num_blocks += 1

    # -- of a dialect; ``num_blocks`` is the number of the block --------------------------------------------------

    @abstractmethod
    def begin_block(self, kind: Kind) -> Iterable[bytes]: ...

    @abstractmethod
    def write_delta(self, kind: Kind, text: str) -> Iterable[bytes]: ...

    @abstractmethod
    def end_block(self, kind: Kind, text: str) -> Iterable[bytes]: ...

    @abstractmethod
    def write_call(self, call: Call) -> Iterable[bytes]: ...

    @abstractmethod
    def end(self, turn: CapturedTurn) -> Iterable[bytes]: ...
