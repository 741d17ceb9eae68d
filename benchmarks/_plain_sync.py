"""The plain scheme of moving weights, for comparison, and a raw file sender: a process of its own, and its receiver.

As in the compared systems: one thread compares the new tensors with the old ones, every change goes as a 32-bit
index and a bf16 value, all over one TCP stream after encoding; the receiver reads its model file, applies
the changes, writes a complete new file and renames the result, and the engine then loads that file. No digest is
verified. The file lies in /dev/shm, which is faster than a disk. The compare exists twice: ``torch``, as those systems
write it, and ``numpy``, which is four times faster.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import socket
import struct
import time
import warnings
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from services.common.weights.snapshot import Snapshot, TensorEntry, TensorSpec, lay_out

_COUNT = struct.Struct("<I")
_SIZE = struct.Struct("<Q")


class PlainSender:
    """The sending process, pinned to the given cores."""

    def __init__(self, cores: Iterable[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, sorted(cores)), daemon=True)
        self._process.start()
        self.address: tuple[str, int] = self._pipe.recv()

    def load(self, path: Path) -> None:
        """Hold this version, touched page by page; the last two are held, as a trainer holds old and new."""
        self._ask("load", str(path))

    def send_delta(self, compare: str) -> None:
        """Begin: compare the two versions held, then send to each client."""
        self._pipe.send(("delta", compare))

    def send_file(self) -> None:
        """Begin: the newest version's tensors by sendfile, to each client."""
        self._pipe.send(("file", ""))

    def done(self) -> float:
        """Wait for the end of sending; returns the seconds of comparing."""
        return float(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(("end", ""))
        self._process.join(10)

    def _ask(self, *words: str) -> None:
        self._pipe.send(words)
        self._pipe.recv()


def _serve(pipe: Connection, cores: list[int]) -> None:
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes into it
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname())
    held: list[Snapshot] = []
    while True:
        word, argument = pipe.recv()
        began, spent = time.perf_counter(), 0.0
        if word == "end":
            return
        if word == "load":
            held = [*held[-1:], Snapshot(Path(argument))]
            np.frombuffer(held[-1].data, dtype=np.uint8)[:: mmap.PAGESIZE].sum()
        elif word == "delta":
            encoded = _compare(held[0], held[1], argument)
            spent = time.perf_counter() - began
            with listener.accept()[0] as connection:
                connection.sendall(_SIZE.pack(sum(map(len, encoded))))
                for part in encoded:
                    connection.sendall(part)
        elif word == "file":
            with listener.accept()[0] as connection:
                _send_file(connection, held[-1])
        pipe.send(spent)


def _compare(old: Snapshot, new: Snapshot, compare: str) -> list[bytes]:
    encoded = []
    for was, now in zip(old.manifest.tensors, new.manifest.tensors, strict=True):
        before, after = old.bits(was), new.bits(now)
        if compare == "torch":
            left, right = (torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for bits in (before, after))
            changed = (left != right).nonzero().view(-1)
            indices, values = changed.to(torch.int32).numpy(), right[changed].view(torch.int16).numpy()
        else:
            positions = np.flatnonzero(before != after)
            indices, values = positions.astype(np.int32), after[positions].view(np.int16)
        encoded += [_COUNT.pack(len(indices)), indices.tobytes(), values.tobytes()]
    return encoded


def _send_file(connection: socket.socket, snapshot: Snapshot) -> None:
    size = snapshot.manifest.size_bytes
    offset = snapshot.path.stat().st_size - size
    end = offset + size
    with snapshot.path.open("rb") as file:
        while offset < end:
            offset += os.sendfile(connection.fileno(), file.fileno(), offset, end - offset)


def receive_into(address: tuple[str, int], buffer: memoryview) -> None:
    """One TCP stream into a buffer."""
    with socket.create_connection(address) as connection:
        _fill(connection, buffer)


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        received = connection.recv_into(buffer[done:])
        if not received:
            raise ConnectionError("the sender ended early")
        done += received


class PlainReceiver:
    """A model file, and an engine's tensors loaded from the file."""

    def __init__(self, specs: Iterable[TensorSpec], path: Path) -> None:
        self.entries: tuple[TensorEntry, ...] = lay_out(specs)
        self.path = path
        self.engine = {entry.name: torch.zeros(entry.num_elements, dtype=torch.int16) for entry in self.entries}

    def start_from(self, snapshot: Snapshot) -> None:
        """Write and load the file of the first version."""
        self._write(np.frombuffer(snapshot.data, dtype=np.uint8)[: snapshot.manifest.size_bytes])
        self._load()

    def take(self, address: tuple[str, int]) -> None:
        """Receive the changes, rewrite the file, load the file into the engine."""
        with socket.create_connection(address) as connection:
            head = bytearray(_SIZE.size)
            _fill(connection, memoryview(head))
            changes = bytearray(_SIZE.unpack(head)[0])
            _fill(connection, memoryview(changes))
        with self.path.open("rb") as file:
            file.seek(self._begin(file.read(8)))
            data = np.fromfile(file, dtype=np.uint8)
        offset = 0
        for entry in self.entries:
            [count] = _COUNT.unpack_from(changes, offset)
            indices = np.frombuffer(changes, dtype=np.int32, count=count, offset=offset + 4)
            values = np.frombuffer(changes, dtype=np.int16, count=count, offset=offset + 4 + 4 * count)
            data[entry.offset : entry.offset + entry.length].view(np.int16)[indices] = values
            offset += 4 + 6 * count
        self._write(data)
        self._load()

    def equals(self, snapshot: Snapshot) -> bool:
        """Whether the engine holds that version."""
        return all(
            np.array_equal(self.engine[entry.name].numpy().view(np.uint16), snapshot.bits(entry))
            for entry in snapshot.manifest.tensors
        )

    def _write(self, data: np.ndarray) -> None:
        header = json.dumps({entry.name: [entry.offset, entry.length] for entry in self.entries}).encode()
        header += b" " * (-(8 + len(header)) % 64)
        beside = self.path.with_suffix(".beside")
        with beside.open("wb") as file:
            file.write(_SIZE.pack(len(header)) + header)
            data.tofile(file)
        beside.rename(self.path)

    def _begin(self, head: bytes) -> int:
        return 8 + int(_SIZE.unpack(head)[0])

    def _load(self) -> None:
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            begin = self._begin(mapped[:8])
            for entry in self.entries:
                bits = torch.frombuffer(
                    mapped, dtype=torch.int16, count=entry.num_elements, offset=begin + entry.offset
                )
                self.engine[entry.name].copy_(bits)
                del bits
