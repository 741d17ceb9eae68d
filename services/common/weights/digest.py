"""Digests of tensors and of weight versions.

A tensor's digest covers its raw little-endian bytes. A version's digest covers, for its tensors sorted by name:
name, dtype, shape and tensor digest. So it does not depend on the order in which tensors are stored or sent,
and it can be computed from tensor digests alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.errors import CorruptDataError

if TYPE_CHECKING:
    from services.common.weights.manifest import TensorEntry

ALGORITHM = "xxh3-128"
PLACEHOLDER = f"{ALGORITHM}:{'0' * 32}"  # as long as every digest, so that layouts can be computed before data exists


def tensor_digest(data: npt.NDArray[np.generic] | bytes | memoryview) -> str:
    """Digest of the raw bytes of one tensor. Arrays must be contiguous and little-endian."""
    # xxhash lets go of the interpreter lock for large buffers, so threads may digest beside other work.
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data.data if isinstance(data, np.ndarray) else data)}"


def version_digest(tensors: Iterable[TensorEntry]) -> str:
    """Digest of a whole version from the records of its tensors."""
    state = xxhash.xxh3_128()
    for entry in sorted(tensors, key=lambda tensor: tensor.name):
        shape = ",".join(str(extent) for extent in entry.shape)
        state.update(f"{entry.name}\0{entry.dtype}\0{shape}\0".encode())
        state.update(_raw(entry.digest))
    return f"{ALGORITHM}:{state.hexdigest()}"


def _raw(digest: str) -> bytes:
    algorithm, _, value = digest.partition(":")
    if algorithm != ALGORITHM or len(value) != 32:
        raise CorruptDataError(f"digest {digest!r} is not of the form {ALGORITHM}:<32 hexadecimal digits>")
    try:
        return bytes.fromhex(value)
    except ValueError:
        raise CorruptDataError(f"digest {digest!r} is not hexadecimal") from None
