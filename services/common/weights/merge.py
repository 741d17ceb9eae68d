"""Consecutive deltas of one tensor made into one, from the newest version's bits alone.

What no delta touches is in the base what it is in the newest version. Steps wrap, so what the deltas step forward is
stepped back from the newest bits, in any order, and the result is exactly the base. The one chunk form that has no
steps is raw; where a chunk is raw in any delta, its newest elements are sent raw, for which no base is needed.

Knows nothing about versions or snapshots; the caller sees to it that deltas are consecutive and end at the newest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.common.weights.codec import CHUNK_ELEMENTS, ChunkSteps, TensorEncoder, decode_steps
from services.common.weights.dtypes import Bits, element_type
from services.common.weights.manifest import Profile
from services.common.weights.steps import step_back


def merge_tensor(deltas: Sequence[bytes], newest: Bits, dtype: str, profile: Profile) -> bytes:
    """One delta that leads from where the first delta starts to ``newest``.

    ``deltas`` are in the fast profile, oldest first; b"" is a version in which the tensor did not change. Applied to
    the base, the result gives ``newest`` bit for bit; an element that changed and changed back is not in it. With one
    delta this changes its profile.

    Raises:
        CorruptDataError: a delta is damaged.
        ValueError: a delta is not in the fast profile.
    """
    changed = [delta for delta in deltas if len(delta)]
    if not changed:
        return b""
    if len(changed) == 1 and profile is Profile.FAST:
        return bytes(changed[0])
    is_float = element_type(dtype).is_float
    encoder = TensorEncoder(dtype, profile, len(newest))
    streams = [decode_steps(newest, delta) for delta in changed]
    upcoming = [next(stream, None) for stream in streams]
    while waiting := [chunk.start for chunk in upcoming if chunk is not None]:
        start = min(waiting)
        here: list[ChunkSteps] = []
        for place, chunk in enumerate(upcoming):
            if chunk is not None and chunk.start == start:
                here.append(chunk)
                upcoming[place] = next(streams[place], None)
        after = newest[start : start + CHUNK_ELEMENTS]
        if any(chunk.steps is None for chunk in here):
            encoder.add_raw(start, after)
        else:
            encoder.add(start, _before(after, here, is_float), after)
    return encoder.finish()


def _before(after: Bits, chunks: Sequence[ChunkSteps], is_float: bool) -> Bits:
    before: Bits = np.array(after)
    for chunk in chunks:
        assert chunk.steps is not None
        if chunk.positions is None:
            before = step_back(before, chunk.steps, is_float)
        else:
            before[chunk.positions] = step_back(before[chunk.positions], chunk.steps, is_float)
    return before
