"""Decoding steps of the torch engine as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from services.common.config.processes import BLOCK_TOKENS, blocks_of
from services.inference.engine.torch.decoder import Decoder
from services.inference.engine.torch.kv import DUMP, EMPTY, Bucket, Ints, Reach
from services.inference.engine.torch.slots import Drawn, sample_plain

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Replay = Callable[[], torch.Tensor]

ROW_STEP = 8  # rows are rounded up to a power of two up to this, then to its multiples
LEAST_WIDTH = 256  # positions that attention reads are rounded up to this times a power of two
DUMP_PLACE = DUMP * BLOCK_TOKENS
WARM_UPS = 2  # calls before a capture, in which libraries allocate their workspaces


class CudaCapture:
    """Captures steps as CUDA graphs that share one memory pool: one graph runs at a time."""

    def __init__(self) -> None:
        self._pool: _POOL_HANDLE | None = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, step: Replay) -> Replay:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()  # writes the same keys and values to the same places each time
        torch.cuda.current_stream().wait_stream(side)
        if not self._graphs:  # a pool ends with its last graph, and torch refuses a capture into it
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        # Other threads prepare weight updates on the device meanwhile, which the default mode would forbid.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


class StaticStep:
    """``Decoder.decode`` over static buffers, so that a CUDA graph of each shape is captured once and replayed afterwards.

    A step is hundreds of kernels. At few rows their submission from Python takes longer than they run; a graph submits all
    at once. A replay reads and writes the memory of its capture, so the inputs are copied into buffers that stay, and shapes
    are rounded up to few: rows that pad read EMPTY and write to DUMP (``kv``). Weights and the pool of blocks stay in place
    over updates, so graphs stay valid.

    Tests on a CPU put a capture that calls the step in the place of ``CudaCapture``: buffers, shapes and arguments are the
    same.
    """

    extends_up_to = 0

    def __init__(self, decoder: Decoder, num_slots: int) -> None:
        self._cache = decoder.cache
        self._decoder = decoder
        self._capture = CudaCapture()
        self._num_slots = num_slots
        device = decoder.device
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._positions = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._places = torch.full((num_slots,), DUMP_PLACE, device=device)
        self._table = torch.full((num_slots, blocks_of(decoder.context_length)), EMPTY, device=device)
        self._replays: dict[tuple[int, int], Replay] = {}

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        """Logits [num_rows, vocabulary], valid until the next call."""
        num_rows = len(tokens)
        rows = padded_rows(num_rows, self._num_slots)
        width = padded_width(int(positions.max()) + 1, self._decoder.context_length)
        self._fill(slots, tokens, positions, rows, blocks_of(width))
        key = rows, width
        if key not in self._replays:
            self._replays[key] = self._capture(self._bound(rows, width))
        return self._replays[key]()[:num_rows]

    def draw(self, logits: torch.Tensor, uniform: npt.NDArray[np.float64]) -> Drawn:
        return sample_plain(logits, uniform)

    def extend(self, slots: Ints, tokens: Ints, positions: Ints) -> None:
        raise AssertionError("graphs extend nothing")

    def refresh(self) -> None:
        """Nothing to do: a replay reads the weights where they are."""

    def forget(self) -> None:
        """Drop all captured steps and their memory: what they name will have other addresses."""
        self._replays.clear()

    def _fill(self, slots: Ints, tokens: Ints, positions: Ints, rows: int, num_blocks: int) -> None:
        num_rows = len(tokens)
        inputs = np.zeros((2, rows), dtype=np.int64)
        inputs[:, :num_rows] = tokens, positions
        table = np.full((rows, num_blocks), EMPTY, dtype=np.int64)
        table[:num_rows] = self._cache.table[slots, :num_blocks]
        fed = torch.from_numpy(inputs).to(self._decoder.device)
        self._tokens[:rows].copy_(fed[0])
        self._positions[:rows].copy_(fed[1])
        self._places[:num_rows].copy_(self._cache.places(slots, positions))
        self._places[num_rows:rows].fill_(DUMP_PLACE)
        self._table[:rows, :num_blocks].copy_(torch.from_numpy(table))

    def _bound(self, rows: int, width: int) -> Replay:
        """The step over the leading parts of the buffers."""
        tokens, positions, places = self._tokens[:rows], self._positions[:rows], self._places[:rows]
        reach = Reach(self._table[:rows, : blocks_of(width)], width)
        return lambda: self._decoder.step(tokens, positions, places, [Bucket(0, rows, width)], [reach])


def padded_rows(num_rows: int, most: int) -> int:
    """
    >>> [padded_rows(n, 20) for n in (1, 3, 8, 9, 17)]
    [1, 4, 8, 16, 20]
    """
    rows = 1 << (num_rows - 1).bit_length() if num_rows <= ROW_STEP else -(-num_rows // ROW_STEP) * ROW_STEP
    return min(rows, most)


def padded_width(width: int, most: int) -> int:
    """
    >>> [padded_width(n, 1000) for n in (1, 256, 257, 600)]
    [256, 256, 512, 1000]
    """
    return min(most, LEAST_WIDTH << max(0, -(-width // LEAST_WIDTH) - 1).bit_length())
