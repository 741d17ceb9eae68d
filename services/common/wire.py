"""Records on the wire: dataclasses become protobuf messages and back, field by field, by name.

``write(record, message)`` fills an empty message, ``read(Kind, message)`` returns the record. The code of a conversion is
generated once per pair of types, at its first use, as ``dataclasses`` generates ``__init__``: so that a field is written down
once, and a conversion takes no longer than one by hand.

    record                                        message
    int, float, bool, str, bytes                  the same
    Enum                                          an enum with the member's name behind a prefix; unknown numbers are refused
    str                                           an enum with the text in capitals behind a prefix; empty for unknown numbers,
                                                  which a tuple of such leaves out
    NDArray[int32], NDArray[float32]              bytes, little-endian; reading gives a view without a copy
    tuple[X, ...], Mapping[str, X], X | None      repeated, map, a field with presence
    a dataclass                                   a message
    Mapping in a field ``x``                      bytes in a field ``x_json``
    float                                         Timestamp, or Duration in a field without the unit (``timeout_s``: ``timeout``)

A field with a default is read as the default where the message has presence and leaves it out. Names that differ are in
``RENAMED``; a field that is renamed to nothing is left out. A record in ``DISPLAYED`` is for people and decides nothing: its invalid numbers are dropped and lone surrogates
of its texts replaced, instead of being refused.

Raises ``InvalidRequestError`` with the name of the field for a value that cannot be read, and for a record that its own
checks refuse.

Below are the conversions that this cannot do. Token ids and log-probabilities travel as little-endian bytes; reading gives
views on them. Timings and time accounts are for display and decide nothing: an invalid time in them is dropped.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import orjson
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration as ProtoDuration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp as ProtoTimestamp

from services.common.errors import CorruptDataError, InvalidRequestError
from services.common.pb import pool_pb2, training_pb2, weights_pb2
from services.common.records import (
    FetchPlan,
    RefusalReason,
    RolloutFailure,
    RolloutPhase,
    TrainingSequence,
    WeightTransfer,
    encodable,
)
from services.common.telemetry.accounts import AccountState, ActivityTime, PeerState
from services.common.weights.snapshot import AdapterIdentity, Payload, TensorEntry, version_digest

Kind = TypeVar("Kind")
M = TypeVar("M", bound=Message)
S = TypeVar("S", ProtoTimestamp, ProtoDuration)

RENAMED: dict[type, dict[str, str]] = {
    ActivityTime: {"name": "activity"},
    AdapterIdentity: {"base": "base_digest"},
    FetchPlan: {"own_shard": "own_stripe"},
    TensorEntry: {"offset": "payload_offset", "length": "payload_length"},
    WeightTransfer: {"started_at": "start_time"},
}
DISPLAYED: set[type] = {RolloutPhase, RolloutFailure, ActivityTime, AccountState, PeerState}

_MOST_S = 1e9  # thirty years: larger values are not measured, and instants computed with them would not fit the wire
_LONG_INTEGER = re.compile(rb"(\d{18})\d+")


def write(record: Any, message: M) -> M:
    """Fill an empty message, such as a field of another one, and return it."""
    kind: Any = type(record)
    _writer(kind, message.DESCRIPTOR)(record, message)
    return message


def read(kind: type[Kind], message: Message, **given: Any) -> Kind:
    """The record in a message; ``given``: fields that the message does not have."""
    what: Any = kind  # mypy takes no class for hashable
    found: Kind = _reader(what, message.DESCRIPTOR)(message, given)
    return found


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object from the wire; raises ``InvalidRequestError`` with the name ``what``."""
    try:
        value = orjson.loads(_LONG_INTEGER.sub(rb"\1", data)) if data else {}
        if _LONG_INTEGER.search(data):  # orjson makes a float of an integer beyond 64 bits
            value = json.loads(data)
    except ValueError as error:
        raise InvalidRequestError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def finite(number: float) -> float:
    """A measured number, for display: an invalid value becomes 0."""
    if 0.0 <= number <= _MOST_S:
        return number
    return _MOST_S if _MOST_S < number < math.inf else 0.0


# -- values of fields ---------------------------------------------------------------------------------------------------


class _Members(dict[int, Any]):
    """Members by number; refuses unknown numbers with the name of the field."""

    def __init__(self, found: Mapping[int, Any], name: str) -> None:
        super().__init__(found)
        self._name = name

    def __missing__(self, number: int) -> Any:
        raise InvalidRequestError(f"{self._name} is missing or unknown (got {number})")


def members(kind: type[enum.Enum], values: Any, name: str = "") -> tuple[dict[Any, int], _Members]:
    """Numbers by member and members by number of an enum on the wire; a member without a value there is number 0."""
    behind = {value.name.removeprefix(f"{_prefix(values)}_"): value.number for value in values.values}
    numbers = {member: behind.get(member.name, 0) for member in kind}
    return numbers, _Members({number: member for member, number in numbers.items()}, name or kind.__name__)


def _texts(values: Any) -> tuple[dict[str, int], dict[int, str]]:
    prefix = f"{_prefix(values)}_"
    numbers = {value.name.removeprefix(prefix).lower(): value.number for value in values.values if value.number}
    return numbers, {number: text for text, number in numbers.items()}


def _prefix(values: Any) -> str:
    """Of the enum's values, which begin with its name: ``TOKEN_SOURCE``."""
    return str(values.values_by_number[0].name).removesuffix("_UNSPECIFIED")


def _refusal(message: Message, arrays: list[str], error: ValueError) -> InvalidRequestError:
    """Of a record: an array that is cut, or what the record's own checks say."""
    for name in arrays:
        if (num_bytes := len(getattr(message, name))) % 4:
            what = f"{message.DESCRIPTOR.name}.{name}"
            return InvalidRequestError(f"{what} has {num_bytes} bytes; they must be whole 4-byte values")
    return InvalidRequestError(str(error))


def _write_seconds(message: S, seconds: float) -> S:
    whole = int(seconds // 1)
    message.seconds, message.nanos = whole, min(999_999_999, int((seconds - whole) * 1e9))
    return message


def read_seconds(message: ProtoTimestamp | ProtoDuration) -> float:
    return float(message.seconds + message.nanos * 1e-9)


# -- generated code -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    hint: Any  # without None and without the names of new types
    is_optional: bool
    wire: FieldDescriptor
    default: Any  # MISSING without one

    @property
    def message(self) -> Descriptor | None:
        return self.wire.message_type


def _fields(kind: Any, descriptor: Descriptor) -> list[_Field]:
    hints, found = typing.get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        name, bare = field.name, field.name.removesuffix("_s")
        renamed = RENAMED.get(kind, {}).get(name)
        names = (name, f"{name}_json", bare, f"{bare}_time") if renamed is None else (renamed,)
        wire = next((descriptor.fields_by_name[name] for name in names if name in descriptor.fields_by_name), None)
        if wire is None:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        hint = hints[field.name]
        is_optional = isinstance(hint, types.UnionType) and type(None) in hint.__args__
        if is_optional:
            hint = next(each for each in hint.__args__ if each is not type(None))
        found.append(_Field(field.name, getattr(hint, "__supertype__", hint), is_optional, wire, default))
    return found


@functools.cache
def _writer(kind: type, descriptor: Descriptor) -> Callable[[Any, Any], None]:
    scope: dict[str, Any] = {"encodable": encodable, "write_seconds": _write_seconds, "dumps": orjson.dumps}
    lines = ["def convert(r, m):", "    pass"]
    for number, field in enumerate(_fields(kind, descriptor)):
        wire, name, value = field.wire, f"m.{field.wire.name}", f"r.{field.name}"
        code = _written(field, name, value, number, scope, kind in DISPLAYED)
        if field.is_optional:
            code = [f"if {value} is not None:", *(f"    {line}" for line in code)]
        elif wire.has_presence and _is_plain(field.default):
            scope[f"d{number}"] = field.default
            code = [f"if {value} != d{number}:", *(f"    {line}" for line in code)]
        lines += [f"    {line}" for line in code]
    exec("\n".join(lines), scope)  # of the names of fields only
    made: Callable[[Any, Any], None] = scope["convert"]
    return made


def _is_plain(default: Any) -> bool:
    """Whether equality with this default is worth a look: of numbers, and of records such as an empty timing."""
    return default is not dataclasses.MISSING and not isinstance(default, (np.ndarray, Mapping))


def _written(field: _Field, name: str, value: str, number: int, scope: dict[str, Any], displayed: bool) -> list[str]:
    wire, inner = field.wire, typing.get_args(field.hint)
    if field.message is not None and field.message.GetOptions().map_entry:
        return [f"if {value}:", f"    {name}.update({value})"]
    if field.message is not None and wire.is_repeated:
        scope[f"w{number}"] = _writer(inner[0], field.message)
        return [f"for each in {value}:", f"    w{number}(each, {name}.add())"]
    if field.message is not None and field.hint is float:
        return [f"{name}.SetInParent()", f"write_seconds({name}, {value})"]
    if field.message is not None:
        scope[f"w{number}"] = _writer(field.hint, field.message)
        return [f"{name}.SetInParent()", f"w{number}({value}, {name})"]
    if wire.is_repeated and wire.enum_type is not None:
        scope[f"e{number}"] = _texts(wire.enum_type)[0]
        return [f"{name}.extend([e{number}[each] for each in {value}])"]
    if wire.is_repeated:
        return [f"{name}.extend({value})"]
    if wire.enum_type is not None:
        if field.hint is str:
            scope[f"e{number}"] = _texts(wire.enum_type)[0]
            return [f"{name} = e{number}.get({value}, 0)"]
        scope[f"e{number}"] = members(field.hint, wire.enum_type)[0]
        return [f"{name} = e{number}[{value}]"]
    if wire.type == FieldDescriptor.TYPE_BYTES and field.hint is not bytes:
        if wire.name.endswith("_json"):
            return [f"{name} = dumps({value})"]
        scope[f"t{number}"] = _dtype(field.hint)
        return [f"{name} = {value}.astype(t{number}, copy=False).tobytes()"]
    if displayed and wire.type == FieldDescriptor.TYPE_STRING:
        return [f"{name} = {value} if {value}.isascii() else encodable({value})"]
    return [f"{name} = {value}"]


@functools.cache
def _reader(kind: type, descriptor: Descriptor) -> Callable[[Any, Mapping[str, Any]], Any]:
    scope: dict[str, Any] = {
        "kind": kind,
        "finite": finite,
        "frombuffer": np.frombuffer,
        "arrays": [],
        "read_seconds": read_seconds,
        "json_object": json_object,
        "refusal": _refusal,
    }
    parts, known = [], _fields(kind, descriptor)
    for number, field in enumerate(known):
        code = _read(field, f"m.{field.wire.name}", number, scope, kind)
        if field.wire.has_presence and (field.is_optional or field.default is not dataclasses.MISSING):
            scope[f"d{number}"] = None if field.default is dataclasses.MISSING else field.default
            code = f"{code} if m.HasField({field.wire.name!r}) else d{number}"
        parts.append(f"{field.name}={code}")
    if len(known) < len(dataclasses.fields(kind)):  # type: ignore[arg-type]
        parts.append("**given")
    source = f"""def convert(m, given):
    try:
        return kind({", ".join(parts)})
    except ValueError as error:
        raise refusal(m, arrays, error) from None"""
    exec(source, scope)  # of the names of fields only
    made: Callable[[Any, Mapping[str, Any]], Any] = scope["convert"]
    return made


def _read(field: _Field, name: str, number: int, scope: dict[str, Any], kind: type) -> str:
    wire, inner = field.wire, typing.get_args(field.hint)
    what = ".".join(wire.full_name.split(".")[-2:])
    if field.message is not None and field.message.GetOptions().map_entry:
        return f"(dict({name}) if {name} else {{}})"  # to copy an empty map takes a microsecond
    if field.message is not None and wire.is_repeated:
        scope[f"r{number}"] = _reader(inner[0], field.message)
        return f"tuple([r{number}(each, {{}}) for each in {name}])"
    if field.message is not None and field.hint is float:
        return f"read_seconds({name})"
    if field.message is not None:
        scope[f"r{number}"] = _reader(field.hint, field.message)
        return f"r{number}({name}, {{}})"
    if wire.is_repeated and wire.enum_type is not None:
        scope[f"e{number}"] = _texts(wire.enum_type)[1]
        return f"tuple([e{number}[each] for each in {name} if each in e{number}])"
    if wire.is_repeated:
        return f"tuple({name})"
    if wire.enum_type is not None:
        if field.hint is str:
            scope[f"e{number}"] = _texts(wire.enum_type)[1]
            return f"e{number}.get({name}, '')"
        scope[f"e{number}"] = members(field.hint, wire.enum_type, what)[1]
        return f"e{number}[{name}]"
    if wire.type == FieldDescriptor.TYPE_BYTES and field.hint is not bytes:
        if wire.name.endswith("_json"):
            return f"json_object({name}, {what!r})"
        scope["arrays"].append(wire.name)
        scope[f"t{number}"] = dtype = _dtype(field.hint)
        scope[f"n{number}"] = np.zeros(0, dtype)
        return f"(frombuffer(data, t{number}) if (data := {name}) else n{number})"
    if wire.type == FieldDescriptor.TYPE_DOUBLE and kind in DISPLAYED:
        return f"finite({name})"
    return name


def _dtype(hint: Any) -> np.dtype[Any]:
    """Of ``NDArray[np.int32]``, in the byte order of the wire."""
    dtype: np.dtype[Any] = np.dtype(typing.get_args(typing.get_args(hint)[1])[0])
    return dtype.newbyteorder("<")


# --- Conversions by hand.


REFUSAL_NUMBERS, REFUSAL_REASONS = members(RefusalReason, pool_pb2.RefusalReason.DESCRIPTOR)


def timestamp_to_proto(seconds: float) -> ProtoTimestamp:
    return _write_seconds(ProtoTimestamp(), seconds)


def duration_to_proto(seconds: float) -> ProtoDuration:
    return _write_seconds(ProtoDuration(), seconds)


def batch_chunks(items: Iterable[TrainingSequence], most_bytes: int) -> Iterator[training_pb2.PullBatchResponse]:
    """The sequences in order, as many in a chunk as fit into ``most_bytes``; one that does not is alone in its chunk."""
    response, size = training_pb2.PullBatchResponse(), 0
    for item in items:
        proto = write(item, response.chunk.sequences.add())
        num_bytes = proto.ByteSize()
        if size and size + num_bytes > most_bytes:
            following = training_pb2.PullBatchResponse()
            following.chunk.sequences.append(proto)
            del response.chunk.sequences[-1]
            yield response
            response, size = following, 0
        size += num_bytes
    if size:
        yield response


def payload_from_proto(proto: weights_pb2.Payload) -> Payload:
    """Raises ``CorruptDataError`` for values this end does not know, or a version digest that its tensors contradict."""
    try:
        payload = read(Payload, proto)
    except InvalidRequestError as error:
        raise CorruptDataError(f"the manifest has a value unknown here: {error.message}") from None
    target = payload.target
    if (made := version_digest(target.tensors, target.adapter)) != target.digest:
        raise CorruptDataError(
            f"the manifest of version {target.version} names digest {target.digest}, its tensors make {made}"
        )
    return payload
