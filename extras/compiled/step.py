"""A decoder's step in compiled C: tokens in, KV in the cache and logits out, in one call.

At the sizes that a CPU trains, a step of separate tensor operations takes most of its time between them. This one works on a
second copy of the weights, packed in the order in which the products read them, hence only for small float32 models on a CPU;
adapters are merged into the copy. ``step.c`` has the arithmetic and the layouts.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch

from services.common.config.processes import BLOCK_TOKENS
from services.inference.engine.torch.blocks import LowRank
from services.inference.engine.torch.decoder import Decoder
from services.inference.engine.torch.kv import Ints
from services.inference.engine.torch.slots import Drawn

# --- Compiles a C file into a shared library for this machine's CPU, once, and keeps it in the user's cache.


log = structlog.get_logger(__name__)

# Errors of mathematical functions are not asked for, so the compiler may vectorise; NaN and infinity keep their meaning.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_TIMEOUT_S = 120.0


class CompileError(Exception):
    """There is no library; the message says why."""


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """The library of a C file; None, with a warning in the log, where it cannot be compiled."""
    try:
        return ctypes.CDLL(str(_compiled(source)))
    except (CompileError, OSError) as error:
        log.warning(
            "engine.not_compiled",
            reason=str(error),
            consequence="small models decode with torch, at 1.6 to 11 times the CPU time per step",
            action="install a C compiler (Debian: apt-get install gcc libc6-dev), or name one in the variable CC",
        )
        return None


def _compiled(source: Path) -> Path:
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise CompileError(f"there is no C compiler {os.environ.get('CC') or 'cc'!r}")
    key = hashlib.sha256(source.read_bytes())
    key.update(repr((_FLAGS, compiler, os.stat(compiler).st_mtime_ns, platform.machine(), _cpu())).encode())
    folder = _folder()
    path = folder / f"{source.stem}-{key.hexdigest()[:32]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may compile the same
            made = Path(own) / path.name
            _run([compiler, *_FLAGS, str(source), "-o", str(made), "-lm"])
            os.replace(made, path)
    return path


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{' '.join(command)} failed: {error.stderr[-1000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{' '.join(command)} did not end within {_TIMEOUT_S:.0f} s") from error


def _folder() -> Path:
    """The user's cache of compiled code; a temporary folder where there is none that only the user can write."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "rollmill" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if (
            found.st_uid == os.geteuid()
            and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            and os.access(folder, os.W_OK)
        ):
            return folder
    except OSError:  # a home that does not exist or is read-only
        pass
    return Path(tempfile.mkdtemp(prefix="rollmill-native-"))


def _cpu() -> str:
    """What this CPU can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


PACKED_BYTES = 64 << 20  # weights above this are not copied: an update would wait for the copy
SOURCE = Path(__file__).with_name("step.c")
ROWS = 64  # tokens that pass the layers together: more would not stay in a core's cache
THREAD_ROWS = 8  # tokens of a decoding step that are worth a thread
_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64
_LAYER_MATRICES = ("qkv", "output", "gate_up", "down")


class _Layer(ctypes.Structure):
    """``Layer`` of step.c."""

    _fields_ = [
        (name, _Pointer)
        for name in [
            "qkv",
            "qkv_bias",
            "qk_norm",
            "output",
            "output_bias",
            "gate_up",
            "gate_up_bias",
            "down",
            "down_bias",
            "kv",
        ]
    ]


class _Model(ctypes.Structure):
    """``Model`` of step.c."""

    _fields_ = [
        *(
            (name, _Int)
            for name in ["num_layers", "hidden", "heads", "kv_heads", "dim", "ffn", "vocab", "rows", "piece", "pieces"]
        ),
        ("eps", ctypes.c_double),
        *((name, _Pointer) for name in ["layers", "embedding", "head", "cos", "sin", "table"]),
        *((name, _Pointer) for name in ["x", "normed", "qkv", "attended", "gate_up", "inner", "scores"]),
    ]


class NativeStep:
    """The step of one decoder, over its cache; all calls from one thread. ``threads``: of a decoding step."""

    # Torch's attention takes many queries at once, and is faster for longer sequences. Measured on one core.
    extends_up_to = 512

    def __init__(
        self,
        library: ctypes.CDLL,
        decoder: Decoder,
        num_slots: int,
        threads: int,
    ) -> None:
        self._library = library
        library.panel_width.restype = _Int
        self._panel = library.panel_width()
        blocks, cache = decoder.blocks, decoder.cache
        self._blocks, self._embedding, self._cache = blocks, decoder.embedding, cache
        sizes, first = blocks.sizes, blocks.layers[0]
        self._vocab, hidden = blocks.head.shape
        ffn, dim = first.down.shape[1], sizes.head_dim
        table = cache.table
        assert table.flags.c_contiguous and table.dtype == np.int64
        self._layers = (_Layer * blocks.num_layers)()
        # By layer: panels and padded biases, which stay in place over updates.
        self._packed = [self._allocate(layer) for layer in blocks.layers]
        self._head = self._panels(blocks.head)
        self._logits = torch.zeros(num_slots, self._padded(self._vocab))
        widths = {
            "x": hidden, "normed": hidden, "qkv": first.qkv.shape[0], "attended": sizes.heads * dim, "gate_up": 2 * ffn, "inner": ffn
        }  # fmt: skip
        self._models: list[_Model] = []
        self._scratch: list[torch.Tensor] = []
        for _ in range(threads):
            model = _Model(
                num_layers=blocks.num_layers, hidden=hidden, heads=sizes.heads, kv_heads=sizes.kv_heads, dim=dim, ffn=ffn,
                vocab=self._vocab, rows=ROWS, piece=BLOCK_TOKENS, pieces=table.shape[1], eps=sizes.eps,
                layers=ctypes.addressof(self._layers), head=self._head.data_ptr(), cos=blocks.cos.data_ptr(),
                sin=blocks.sin.data_ptr(), table=table.ctypes.data,
            )  # fmt: skip
            slack = self._panel  # the end of a row is read by whole vectors
            for name, width in widths.items():
                setattr(model, name, self._buffer(ROWS * self._padded(width) + slack))
            model.scores = self._buffer(len(blocks.cos) + slack)
            self._models.append(model)
        self._pool = ThreadPoolExecutor(threads, "decoding") if threads > 1 else None
        self.refresh()

    def refresh(self) -> None:
        """Pack the weights again after a change in place. Their tensors, and those of the cache, may have moved."""
        blocks = self._blocks
        for index, (layer, packed, entry) in enumerate(zip(blocks.layers, self._packed, self._layers, strict=True)):
            norms = {"qkv": layer.input_norm, "gate_up": layer.post_norm}
            for name in _LAYER_MATRICES:
                adapter: LowRank = getattr(layer.adapters, name)
                self._pack(adapter.merged(getattr(layer, name)), norms.get(name), packed[name])
                setattr(entry, name, packed[name].data_ptr())
                if (bias := packed.get(f"{name}_bias")) is not None:
                    own = getattr(layer, f"{name}_bias")
                    bias[: len(own)] = own
                    setattr(entry, f"{name}_bias", bias.data_ptr())
            if layer.qk_norm is not None:
                entry.qk_norm = layer.qk_norm.data_ptr()
            entry.kv = self._cache.kv[index].data_ptr()
        self._pack(blocks.head, blocks.final_norm, self._head)
        for model in self._models:
            model.embedding = self._embedding.data_ptr()

    def extend(self, slots: Ints, tokens: Ints, positions: Ints) -> None:
        """Compute the KV of ``tokens``, all [num_tokens]; of one slot in the order of its positions, without a gap."""
        self._feed(self._models[0], (tokens, slots, positions), None)

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        """Logits [num_rows, vocabulary], valid until the next call; all arguments are [num_rows], slots differ."""
        num = len(tokens)
        parts = max(1, min(len(self._models), num // THREAD_ROWS))
        work = partial(self._decode, slots, tokens, positions)
        if self._pool is None or parts == 1:
            work(self._models[0], 0, num)
        else:
            edges = [num * part // parts for part in range(parts + 1)]
            list(self._pool.map(work, self._models[:parts], edges[:-1], edges[1:]))
        return self._logits[:num, : self._vocab]

    def forget(self) -> None:
        """Nothing to do: memory on a CPU keeps its addresses."""

    def draw(self, logits: torch.Tensor, uniform: npt.NDArray[np.float64]) -> Drawn:
        """The same as ``sampler.sample_plain`` for the logits of the last ``decode``."""
        assert logits.data_ptr() == self._logits.data_ptr()
        num, uniform = len(uniform), np.ascontiguousarray(uniform, dtype=np.float64)
        tokens, logprobs = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.float32)
        given = [_address(numbers) for numbers in (uniform, tokens, logprobs)]
        self._library.draw(_Int(num), _Int(self._vocab), _Pointer(logits.data_ptr()), *given)
        return Drawn(tokens=tokens, logprobs=logprobs, kept={})

    def _decode(self, slots: Ints, tokens: Ints, positions: Ints, model: _Model, begin: int, end: int) -> None:
        given = [numbers[begin:end] for numbers in (tokens, slots, positions)]
        self._feed(model, given, self._logits[begin].data_ptr())

    def _feed(self, model: _Model, given: Sequence[Ints], logits: int | None) -> None:
        whole = [np.ascontiguousarray(numbers, dtype=np.int64) for numbers in given]
        self._library.feed(
            ctypes.byref(model), _Int(len(whole[0])), *(_address(numbers) for numbers in whole), _Pointer(logits)
        )

    def _allocate(self, layer: Any) -> dict[str, torch.Tensor]:
        packed = {name: self._panels(getattr(layer, name)) for name in _LAYER_MATRICES}
        for name in (f"{matrix}_bias" for matrix in _LAYER_MATRICES):
            if getattr(layer, name) is not None:
                packed[name] = torch.zeros(self._padded(len(getattr(layer, name))))
        return packed

    def _panels(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.empty(self._padded(weight.shape[0]) * weight.shape[1])

    def _pack(self, weight: torch.Tensor, norm: torch.Tensor | None, panels: torch.Tensor) -> None:
        assert weight.is_contiguous()
        scale = None if norm is None else norm.data_ptr()
        outputs, inputs = weight.shape
        self._library.pack(
            _Pointer(weight.data_ptr()), _Pointer(scale), _Int(outputs), _Int(inputs), _Pointer(panels.data_ptr())
        )

    def _padded(self, width: int) -> int:
        return math.ceil(width / self._panel) * self._panel

    def _buffer(self, num: int) -> int:
        self._scratch.append(torch.zeros(num))
        return self._scratch[-1].data_ptr()


def build_native_step(decoder: Decoder, num_slots: int) -> NativeStep | None:
    """The compiled step of a decoder that suits it; None for others, and where there is no compiler."""
    parameters = list(decoder.model.parameters())
    on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in parameters)
    is_small = sum(p.numel() * p.element_size() for p in parameters) <= PACKED_BYTES
    if not (on_cpu and is_small and decoder.head_dim % 8 == 0):
        return None
    library = load_library(SOURCE)
    if library is None:
        return None
    return NativeStep(library, decoder, num_slots, torch.get_num_threads())


def _address(numbers: npt.NDArray[Any]) -> ctypes.c_void_p:
    return _Pointer(numbers.ctypes.data)
