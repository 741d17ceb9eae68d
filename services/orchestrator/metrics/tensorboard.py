"""Writes scalars as a TensorBoard event file, without TensorBoard.

An event file is a sequence of records (length, checksum, bytes, checksum), each a small protobuf message; this module
encodes the few fields of a scalar. The usual writers import torch where installed, which the orchestrator must not, and
bring threads of their own. Independent of runs and metrics.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_MOST = 3.4028234663852886e38  # of a float32
_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected


def _table() -> tuple[int, ...]:
    entries = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    """As event files store checksums: rotated and offset."""
    value = crc32c(data)
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _float32(value: float) -> float:
    """The nearest number that the file can hold."""
    return max(-_MOST, min(_MOST, value))


class EventFile:
    """Appends scalars to one event file of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("ab", buffering=0)
        self._write(struct.pack("<Bd", 1 << 3 | 1, now) + _bytes_field(3, b"brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One event: field 1 is the time, 2 the step, 5 the summary with its values (1 tag, 2 simple value)."""
        summary = b"".join(
            _bytes_field(1, _bytes_field(1, tag.encode()) + struct.pack("<Bf", 2 << 3 | 5, _float32(value)))
            for tag, value in values.items()
        )
        header = struct.pack("<Bd", 1 << 3 | 1, time.time()) + _varint(2 << 3) + _varint(max(step, 0))
        self._write(header + _bytes_field(5, summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + struct.pack("<I", _masked(length)) + event + struct.pack("<I", _masked(event)))
