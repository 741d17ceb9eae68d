"""Hostile requests for every RPC: seeded, made from the descriptors, sent as raw bytes.

Three kinds, mixed: requests that the schema allows, with invalid values (extremes, NaN, unknown enum values,
wrong-length arrays, JSON nested too deep), requests that the schema does not allow (wrong wire types, unknown fields,
broken UTF-8), and bytes that were cut, flipped or repeated. ``known`` has values that exist at the server under test,
by field name, so that many requests get past the first check. Used by the benchmark of the doors and by tests; the
caller judges.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor

from services.common.pb import (
    environment_pb2,
    judge_pb2,
    pool_pb2,
    run_pb2,
    status_pb2,
    training_pb2,
    weights_pb2,
)

MODULES = (environment_pb2, judge_pb2, pool_pb2, run_pb2, status_pb2, training_pb2, weights_pb2)

_VARINT, _FIXED64, _BYTES, _START, _END, _FIXED32 = 0, 1, 2, 3, 4, 5
_INTEGERS = (0, 1, 2, 3, -1, -2, 127, 2**31 - 1, -(2**31), 2**31, 2**53, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
_TEXTS: tuple[bytes, ...] = (
    b"", b"a", b"x" * 300, b"\x00", b"../../../etc/passwd", b"os:system", b"__import__('os').abort()",
    "\u202e\ud7ff\U0010ffff".encode(), b"%s%n", b"'; drop table trajectories; --", b"{}", b"-1", b"nan",
)  # fmt: skip
_BROKEN_TEXTS = (b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"ok\xf8\x88\x80\x80\x80")
_JSONS: tuple[bytes, ...] = (
    b"", b"{}", b"[]", b"null", b"{", b"1e999", b"NaN", b'{"a": NaN}', b'"\\ud800"', b'{"a": "\\ud800"}',
    b'{"answer": 4}', b'{"answer": null, "question": 1}', b'{"question": "q", "answer": "4", "environment": {"reward": "boxed"}}',
    b'{"environment": {"max_turns": -1}}', b'{"environment": []}', b'{"seed": 1e400}', b"[" * 5000, b'{"a":' * 900,
    b"[" * 900 + b"]" * 900, b'{"answer": ' + b"9" * 5000 + b"}", b"\xff\xfe", b'{"a": 1, "a": 2}',
    b'{"tests": {"kind": "call", "entry_point": "f", "cases": [{"args": [1], "expected": 1}]}, "answer": [1]}',
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rpc:
    """One method of the wire."""

    path: str  # "/rollmill.v1.RunService/GetRun"
    request: Descriptor
    streams_in: bool
    streams_out: bool

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def all_rpcs() -> list[Rpc]:
    """Every RPC of every service in the protos."""
    return [rpc for module in MODULES for rpc in _of_services(module.DESCRIPTOR.services_by_name.values())]


def _of_services(services: Sequence[ServiceDescriptor]) -> Iterator[Rpc]:
    for service in services:
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}"
            yield Rpc(path, method.input_type, method.client_streaming, method.server_streaming)


@dataclass(slots=True)
class Hostile:
    """Makes requests. ``most_bytes`` bounds each."""

    seed: int
    known: Mapping[str, Sequence[str]] = field(default_factory=dict)
    most_bytes: int = 1 << 20
    spared: frozenset[str] = frozenset()  # paths that get only what cannot be parsed
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def request(self, rpc: Rpc) -> bytes:
        """One request for this method."""
        data = self.message(rpc.request)
        return b"\x07" + data if rpc.path in self.spared else data  # wire type 7 does not exist

    def message(self, descriptor: Descriptor) -> bytes:
        """One request of this type, or a similar one."""
        chance = self._random.random()
        data = self._fields(descriptor, hostility=0.05 if chance < 0.4 else 0.35)
        if chance > 0.75:
            data = self._broken(data)
        return data[: self.most_bytes]

    # -- by the schema ------------------------------------------------------------------------------------------

    def _fields(self, descriptor: Descriptor, hostility: float, depth: int = 0) -> bytes:
        parts: list[bytes] = []
        chosen = {oneof.name: self._random.choice(oneof.fields) for oneof in descriptor.oneofs}
        for one in descriptor.fields:
            oneof = one.containing_oneof
            skipped = oneof is not None and chosen[oneof.name] is not one and self._random.random() > hostility / 4
            if skipped or self._random.random() < 0.12:
                continue
            parts += [self._field(one, hostility, depth) for _ in range(self._count(one, hostility))]
        if self._random.random() < hostility:
            self._random.shuffle(parts)  # the order of fields is the sender's
        if self._random.random() < hostility / 3:
            parts.append(self._unknown())
        return b"".join(parts)

    def _count(self, one: FieldDescriptor, hostility: float) -> int:
        if not one.is_repeated:
            return 2 if self._random.random() < hostility / 4 else 1  # the last one counts
        if self._random.random() < hostility / 8:
            return self._random.choice((100, 1000, 5000)) if one.message_type is None else 200
        return self._random.choice((0, 1, 1, 2, 3))

    def _field(self, one: FieldDescriptor, hostility: float, depth: int) -> bytes:
        if self._random.random() < hostility / 10:  # another type than the schema's
            return self._wrongly_typed(one.number)
        kind = one.type
        if kind == FieldDescriptor.TYPE_MESSAGE:
            assert one.message_type is not None
            inner = self._fields(one.message_type, hostility, depth + 1) if depth < 8 else b""
            return _tag(one.number, _BYTES) + _sized(inner)
        if kind == FieldDescriptor.TYPE_STRING:
            return _tag(one.number, _BYTES) + _sized(self._text(one.name, hostility))
        if kind == FieldDescriptor.TYPE_BYTES:
            return _tag(one.number, _BYTES) + _sized(self._bytes(one.name, hostility))
        if kind == FieldDescriptor.TYPE_DOUBLE:
            return _tag(one.number, _FIXED64) + struct.pack("<d", self._random.choice(_FLOATS))
        if kind == FieldDescriptor.TYPE_FLOAT:
            return _tag(one.number, _FIXED32) + struct.pack("<f", self._random.choice((0.0, 1.0, float("nan"))))
        if kind == FieldDescriptor.TYPE_BOOL:
            return _tag(one.number, _VARINT) + _varint(self._random.choice((0, 1, 7)))
        if kind == FieldDescriptor.TYPE_ENUM:
            number = self._random.choice((-1, 99, 2**31 - 1)) if self._hostile(hostility) else self._random.randrange(6)
            return _tag(one.number, _VARINT) + _varint(number)
        number = self._random.choice(_INTEGERS) if self._hostile(hostility) else self._random.choice((0, 1, 1, 2, 3))
        return _tag(one.number, _VARINT) + _varint(number)

    def _hostile(self, hostility: float) -> bool:
        return self._random.random() < hostility

    def _text(self, name: str, hostility: float) -> bytes:
        known = self.known.get(name)
        if known and not self._hostile(hostility):
            return self._random.choice(known).encode()
        if self._random.random() < hostility / 10:
            return self._random.choice(_BROKEN_TEXTS)
        if self._random.random() < hostility / 40:
            return b"z" * self._random.choice((70_000, 600_000))
        return self._random.choice(_TEXTS)

    def _bytes(self, name: str, hostility: float) -> bytes:
        if name.endswith("_json"):
            return self._random.choice(_JSONS)
        if name in ("token_ids", "logprobs") and not self._hostile(hostility):
            return self._random.randbytes(16)
        return self._random.randbytes(self._random.choice((0, 1, 3, 4, 16, 17, 4096)))

    def _wrongly_typed(self, number: int) -> bytes:
        wire = self._random.choice((_VARINT, _FIXED64, _BYTES, _START, _END, _FIXED32))
        return _tag(number, wire) + self._random.randbytes(self._random.choice((1, 4, 8)))

    def _unknown(self) -> bytes:
        choice = self._random.randrange(4)
        if choice == 0:  # groups in groups: what a parser recurses into
            depth = self._random.choice((50, 5000))
            return _tag(99, _START) * depth + _tag(99, _END) * depth
        if choice == 1:
            return _tag(2**29 - 1, _BYTES) + _sized(self._random.randbytes(1000))
        if choice == 2:
            return _tag(1000, _VARINT) + b"\xff" * 9 + b"\x01"
        return b"\x00"

    # -- against any schema -------------------------------------------------------------------------------------

    def _broken(self, data: bytes) -> bytes:
        found = bytearray(data or b"\x0a\x01a")
        for _ in range(self._random.randint(1, 4)):
            place = self._random.randrange(len(found))
            match self._random.randrange(6):
                case 0:
                    del found[place:]
                case 1:
                    found[place] ^= 1 << self._random.randrange(8)
                case 2:
                    found[place:place] = self._random.randbytes(self._random.randrange(1, 9))
                case 3:
                    found += found[: self._random.randrange(1, len(found) + 1)]
                case 4:
                    found[place : place + 1] = b"\xff" * 10  # a length, or a number, beyond all bounds
                case _:
                    found[place:place] = _tag(self._random.randrange(1, 20), _BYTES) + _varint(2**31 - 1)
            if not found:
                return b""
        return bytes(found)


def _tag(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(number: int) -> bytes:
    number &= 2**64 - 1
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)
