"""Arrays of a journal's lines as text: bytes by significance (all lowest bytes, then all next ones), in base64.

Bytes of one significance are alike, so zstd halves them: 6.4 bytes per token with its log-probability, against 7.3 of
decimal numbers, for less time to write and read.
"""

from __future__ import annotations

from binascii import Error, a2b_base64, b2a_base64
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import CorruptDataError

_TOKEN = np.dtype("<i4")
_FLOAT = np.dtype("<f4")
_WIDTH = 4  # bytes of either


def pack_tokens(token_ids: npt.NDArray[np.int32]) -> str:
    """Token ids, [num_tokens] int32: three bytes each where that is enough."""
    if not len(token_ids):
        return ""
    planes = _planes(token_ids, _TOKEN)
    return _text(planes if planes[_WIDTH - 1].any() else planes[: _WIDTH - 1])


def unpack_tokens(text: str, num_tokens: int) -> npt.NDArray[np.int32]:
    """[num_tokens] int32; raises ``CorruptDataError`` for text that does not hold as many."""
    return _array(text, num_tokens, _TOKEN).astype(np.int32, copy=False)


def pack_floats(values: npt.NDArray[np.float32]) -> str:
    """Log-probabilities, [num_tokens] float32, bit by bit."""
    return _text(_planes(values, _FLOAT)) if len(values) else ""


def unpack_floats(text: str) -> npt.NDArray[np.float32]:
    """[num_tokens] float32, bit by bit; raises ``CorruptDataError`` for text that ``pack_floats`` does not write."""
    return _array(text, None, _FLOAT).astype(np.float32, copy=False)


def _planes(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[np.uint8]:
    """[4, num_tokens]"""
    return np.ascontiguousarray(values, dtype=dtype).view(np.uint8).reshape(-1, _WIDTH).T


def _text(planes: npt.NDArray[np.uint8]) -> str:
    return b2a_base64(planes.tobytes(), newline=False).decode("ascii")


def _array(text: str, count: int | None, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not text and not count:
        return np.zeros(0, dtype)
    try:
        data = np.frombuffer(a2b_base64(text), np.uint8)
    except (Error, ValueError) as error:
        raise CorruptDataError(f"an array of a record is not base64: {error}") from error
    count = len(data) // _WIDTH if count is None else count
    width = len(data) // count if count > 0 else 0
    if not 0 < width <= _WIDTH or width * count != len(data):
        raise CorruptDataError(f"an array of a record has {len(data)} bytes for {count} numbers")
    found = np.zeros((count, _WIDTH), np.uint8)
    found[:, :width] = data.reshape(width, count).T
    return found.view(dtype)[:, 0]
