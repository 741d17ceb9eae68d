"""Derives every seed of a run from ``run.seed``.

    run.seed + (train, position in the curriculum)     -> seed of a training task group    = its episodes' seed
    run.seed + (evaluation, dataset, row)              -> seed of an evaluation task group = its episodes' seed
    seed of the task group + (slot, index)             -> the slot's sampling seed

Names, versions and times do not enter: neither the run's id, nor a task group's id, nor a weight version. So two runs
with one ``run.seed`` issue equal seeds, and a repeated slot has its earlier seeds.
"""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, *parts: str | int) -> int:
    """Derive a seed of 62 bits (an int64 has room to count up) for one part of the scope of ``seed``.

    >>> derived_seed(1, "train", 0) == derived_seed(1, "train", 0), derived_seed(1, "train", 0) == derived_seed(1, "train", 1)
    (True, False)
    """
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def slot_seed(group_seed: int, index: int) -> int:
    """The sampling seed of slot ``index`` of a task group."""
    return derived_seed(group_seed, "slot", index)
