"""Files of a checkpoint: any cut of any tensors reads back equal, in any other cut."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from services.common.checkpoints import (
    DTYPES,
    Manifest,
    Piece,
    StoredTensor,
    TensorReader,
    decode,
    encode,
    verify_file,
    write_safetensors,
)
from services.common.errors import CorruptDataError
from services.common.system.machine import sync_directory

Whole = dict[str, tuple[StoredTensor, bytes]]


@st.composite
def tensors(draw: st.DrawFn) -> Whole:
    found: Whole = {}
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        tensor = StoredTensor(dtype=dtype, shape=shape)
        found[f"t{number}"] = (tensor, draw(st.binary(min_size=tensor.size_bytes, max_size=tensor.size_bytes)))
    return found


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """(first, end) of consecutive ranges that cover ``size`` elements once; some may be empty."""
    places = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
    return list(zip([0, *places], [*places, size], strict=True))


def halves(held: memoryview) -> list[memoryview]:
    return [held[:3], held[3:]]


def write(directory: Path, whole: Whole, by_rank: dict[str, list[tuple[int, int]]]) -> Manifest:
    files = []
    for rank in range(max((len(ranges) for ranges in by_rank.values()), default=0)):
        pieces = []
        for name, ranges in by_rank.items():
            tensor, data = whole[name]
            first, end = ranges[rank] if rank < len(ranges) else (0, 0)
            held = memoryview(data)[first * tensor.element_bytes : end * tensor.element_bytes]
            if end > first:
                pieces.append(
                    Piece(
                        tensor=name, dtype=tensor.dtype, shape=(end - first,), first=first, count=end - first,
                        data=partial(halves, held),
                    )
                )  # fmt: skip
        name = f"weights_{rank:05d}.safetensors"
        files.append(write_safetensors(directory / name, name, pieces, {"format": "pt"}))
    return Manifest(
        run_id="r", policy="p", training_step=1, num_updates=2, num_ranks=len(files), optimizer="adamw", written_at=3,
        tensors={name: tensor for name, (tensor, _) in whole.items()}, files=tuple(files),
    )  # fmt: skip


@given(whole=tensors(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_number_of_ranks_reads_the_parts_of_other_ranks(whole: Whole, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        written = {name: data.draw(cuts(tensor.num_elements)) for name, (tensor, _) in whole.items()}
        manifest = decode(encode(write(directory, whole, written)))
        for file in manifest.files:
            verify_file(directory, file)
        with TensorReader(directory, manifest) as reader:
            for name, (tensor, expected) in whole.items():
                for first, end in data.draw(cuts(tensor.num_elements)):
                    into = bytearray((end - first) * tensor.element_bytes)
                    reader.read(name, first, memoryview(into))
                    assert into == expected[first * tensor.element_bytes : end * tensor.element_bytes]
                assert b"".join(bytes(chunk) for chunk in reader.chunks(name, chunk_bytes=7)) == expected


@given(whole=tensors(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_changed_byte_is_noticed_by_the_digest_of_its_file(whole: Whole, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        manifest = write(directory, whole, {name: [(0, tensor.num_elements)] for name, (tensor, _) in whole.items()})
        (file,) = manifest.files
        content = bytearray((directory / file.name).read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        (directory / file.name).write_bytes(content)
        with pytest.raises(CorruptDataError, match="its digest differs"):
            verify_file(directory, file)


@given(whole=tensors(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_changed_byte_of_a_manifest_is_noticed_or_changes_nothing(whole: Whole, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as made:
        ranges = {name: [(0, tensor.num_elements)] for name, (tensor, _) in whole.items()}
        manifest = write(Path(made), whole, ranges)
    encoded = bytearray(encode(manifest))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        assert decode(bytes(encoded)) == manifest
    except CorruptDataError:
        pass


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_bytes_that_are_no_manifest_are_refused_with_a_message(noise: bytes) -> None:
    with pytest.raises(CorruptDataError, match=r"manifest\.json"):
        decode(noise)


def test_the_files_are_safetensors_that_others_read(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    piece = Piece(
        tensor="w", dtype="float32", shape=(2, 3), first=0, count=6, data=lambda: [values.view(np.uint8).data]
    )
    odd = Piece(tensor="b", dtype="uint8", shape=(3,), first=0, count=3, data=lambda: [memoryview(b"abc")])
    write_safetensors(tmp_path / "f.safetensors", "f.safetensors", [odd, piece], {"format": "pt", "run_id": "r"})
    with safe_open(tmp_path / "f.safetensors", framework="numpy") as opened:
        assert np.array_equal(opened.get_tensor("w"), values.reshape(2, 3))
        assert bytes(opened.get_tensor("b")) == b"abc"
        assert opened.metadata() == {"format": "pt", "run_id": "r"}


@pytest.mark.parametrize(("code", "fails"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_directories_takes_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, fails: bool
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError) if fails else contextlib.nullcontext():
        sync_directory(tmp_path)
