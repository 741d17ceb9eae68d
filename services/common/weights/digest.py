"""Digests of tensors and of weight versions.

A tensor's digest covers its raw little-endian bytes. A version's digest covers, for its tensors sorted by name:
name, dtype, shape and tensor digest. So it does not depend on the order in which tensors are stored or sent,
and it can be computed from tensor digests alone.

Two algorithms: xxh3-128, which finds accidents at the speed of memory, and blake3, which also withstands somebody who
wants two versions with one digest. A digest names its algorithm ("xxh3-128:<32 hexadecimal digits>",
"blake3:<64 hexadecimal digits>"), so a receiver verifies with the algorithm of the manifest that it was given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.errors import CorruptDataError

if TYPE_CHECKING:
    from services.common.weights.manifest import TensorEntry

DigestAlgorithm = Literal["xxh3-128", "blake3"]

_HEX_DIGITS: dict[DigestAlgorithm, int] = {"xxh3-128": 32, "blake3": 64}

DEFAULT_ALGORITHM: DigestAlgorithm = "xxh3-128"


def placeholder(algorithm: DigestAlgorithm = DEFAULT_ALGORITHM) -> str:
    """A digest as long as every one of that algorithm, so that layouts can be computed before data exists."""
    return f"{algorithm}:{'0' * _HEX_DIGITS[algorithm]}"


PLACEHOLDER = placeholder()


def algorithm_of(digest: str) -> DigestAlgorithm:
    """The algorithm that a digest names. ``CorruptDataError`` when it is no digest."""
    name, _, value = digest.partition(":")
    if name not in _HEX_DIGITS or len(value) != _HEX_DIGITS[name] or not _is_hex(value):
        forms = " or ".join(f"{known}:<{digits} hexadecimal digits>" for known, digits in _HEX_DIGITS.items())
        raise CorruptDataError(f"digest {digest!r} is not of the form {forms}")
    return name


def tensor_digest(
    data: npt.NDArray[np.generic] | bytes | memoryview,
    algorithm: DigestAlgorithm = DEFAULT_ALGORITHM,
    *,
    num_threads: int = 1,
) -> str:
    """Digest of the raw bytes of one tensor. Arrays must be contiguous and little-endian.

    ``num_threads`` is for blake3, which can use several; xxh3-128 is one thread always.
    """
    raw = data.reshape(-1).view(np.uint8).data if isinstance(data, np.ndarray) else data
    state = _hasher(algorithm, num_threads)
    state.update(raw)  # lets go of the interpreter lock for large buffers, so threads may digest beside other work
    return f"{algorithm}:{state.hexdigest()}"


def digest_parts(
    parts: Iterable[npt.NDArray[np.generic] | bytes | memoryview], algorithm: DigestAlgorithm = DEFAULT_ALGORITHM
) -> str:
    """The digest of parts laid end to end, without laying them so.

    >>> digest_parts([b"we", b"ights"]) == tensor_digest(b"weights")
    True
    """
    state = _hasher(algorithm)
    for part in parts:
        state.update(part.reshape(-1).view(np.uint8).data if isinstance(part, np.ndarray) else part)
    return f"{algorithm}:{state.hexdigest()}"


def version_digest(tensors: Iterable[TensorEntry]) -> str:
    """Digest of a whole version from the records of its tensors, in their algorithm (xxh3-128 when there are none).

    ``CorruptDataError`` when an entry's digest is none, or when two entries name different algorithms.
    """
    entries = sorted(tensors, key=lambda tensor: tensor.name)
    algorithms = {algorithm_of(entry.digest) for entry in entries} or {DEFAULT_ALGORITHM}
    if len(algorithms) > 1:
        raise CorruptDataError(f"one version has digests of several algorithms: {sorted(algorithms)}")
    algorithm = algorithms.pop()
    state = _hasher(algorithm)
    for entry in entries:
        shape = ",".join(str(extent) for extent in entry.shape)
        state.update(f"{entry.name}\0{entry.dtype}\0{shape}\0".encode())
        state.update(bytes.fromhex(entry.digest.partition(":")[2]))
    return f"{algorithm}:{state.hexdigest()}"


def _hasher(algorithm: DigestAlgorithm, num_threads: int = 1) -> Any:
    if algorithm == "xxh3-128":
        return xxhash.xxh3_128()
    from blake3 import blake3  # comes with the services that move weights, not with every importer of a manifest

    return blake3(max_threads=num_threads)


def _is_hex(value: str) -> bool:
    return all(digit in "0123456789abcdef" for digit in value)
