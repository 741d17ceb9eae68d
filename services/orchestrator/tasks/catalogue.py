"""Catalogue of named datasets: their ids on the hub, their local paths, and the conversion of their rows.

``data.train.name: deepscaler`` reads ``$ROLLMILL_DATA_ROOT/deepscaler/…`` when that file exists, and the hub otherwise.
Hub ids without a successful fetch are marked ``tried=False``, and a failed fetch names that. Independent of curricula
and policies.

Tasks of AgentBench's task servers that the reference recipes train and evaluate on are indices into the servers' lists.
ALFWorld counts in the 4,699 games of ``data/alfworld/standard.json`` of AstraFlow's AgentBench: 4,649 training games by
type of task, then 50 of ``valid_unseen``. WebShop counts in its 12,087 goals, shuffled with seed 233.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from services.common.errors import DatasetError
from services.orchestrator.tasks.rows.code import code_row
from services.orchestrator.tasks.rows.math import math_row

DATA_ROOT = "ROLLMILL_DATA_ROOT"

Normalise = Callable[[Mapping[str, Any], str], dict[str, Any]]

FORMS: dict[str, Normalise] = {"math": math_row, "code": code_row}  # by the reward that reads them

# The reference leaves out 547 of the training games, without a stated reason.
_ALFWORLD_TRAIN = """
0-21 42-102 108-109 111-114 116 118-143 145-162 164-182 184-190 192-202 204-205 207-208 210-279 283-336 338-422
424-428 430-455 457-556 558-612 632-698 700-701 703-711 713-723 725-730 732-817 835-880 882-914 916-944 955-969
971-977 979-984 986-989 991-1113 1115-1156 1158-1173 1175-1180 1182-1200 1202-1332 1334-1476 1478-1558 1560-1565
1567-1599 1602-1617 1619-1633 1635-1638 1640-1659 1661-1740 1742-1889 1891-1927 1929-1970 1972-2017 2019-2025
2027-2132 2134-2136 2138-2173 2175-2205 2207-2211 2213-2354 2356-2475 2477-2481 2483-2487 2489-2611 2613-2824
2827-2853 2855 2857-2937 2939-2953 2955 2978-3009 3011-3031 3033-3035 3060-3092 3100-3108 3129-3133 3190-3193
3241-3260 3273-3291 3309-3326 3332-3354 3361-3407 3415-3417 3474-3484 3527-3536 3543-3546 3559-3564 3605-3643
3646-3726 3728-3759 3761-3766 3769-3824 3826-3830 3837-3932 3934-4019 4022-4038 4040-4067 4069-4164 4166-4394
4396-4441 4443 4445-4494 4496-4563 4565-4574 4576-4587 4589-4622 4626-4648
"""


def _numbers(ranges: str) -> tuple[int, ...]:
    """The whole numbers of ranges like ``0-21 116``, both ends included."""
    ends = (tuple(map(int, part.split("-"))) for part in ranges.split())
    return tuple(chain.from_iterable(range(pair[0], pair[-1] + 1) for pair in ends))


ALFWORLD_TRAIN = _numbers(_ALFWORLD_TRAIN)
ALFWORLD_VALID = range(4649, 4699)
WEBSHOP_TRAIN = range(200, 12_087)
WEBSHOP_VALID = range(200)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDataset:
    """One dataset. ``local`` is a path under the data root; ``fetch`` the command for a dataset without automatic
    fetch."""

    normalise: Normalise | None = None  # None: rows are taken as they are
    local: str = ""
    indices: Sequence[int] | None = None  # rows are these numbers, {"index": n}, and there is no file
    hub: str | None = None
    subset: str | None = None
    split: str = "train"
    tried: bool = False
    fetch: str = ""


KNOWN: dict[str, KnownDataset] = {
    "deepcoder-primeintellect": KnownDataset(
        hub="agentica-org/DeepCoder-Preview-Dataset", subset="primeintellect",
        local="deepcoder_primeintellect/train.jsonl", normalise=code_row,
    ),
    "deepcoder-codeforces": KnownDataset(
        hub="agentica-org/DeepCoder-Preview-Dataset", subset="codeforces", split="test",
        local="deepcoder_codeforces/test.jsonl", normalise=code_row,
    ),
    "deepscaler": KnownDataset(
        hub="agentica-org/DeepScaleR-Preview-Dataset", local="deepscaler/sample.jsonl", normalise=math_row
    ),
    "dapo-filter": KnownDataset(hub="aaabiao/dapo_filter", local="dapo_filter/train.jsonl", normalise=math_row),
    "dapo-math-17k": KnownDataset(  # subsets on the hub: all (17,398 rows), en and cn
        hub="open-r1/DAPO-Math-17k-Processed", subset="all", local="dapo_math_17k/train.jsonl", normalise=math_row
    ),
    "gsm8k": KnownDataset(hub="openai/gsm8k", subset="main", local="gsm8k/train.jsonl", normalise=math_row),
    "math-train": KnownDataset(local="math_train/train.jsonl", normalise=math_row),
    "aime-1983-2023": KnownDataset(local="aime_1983_2023/train.jsonl", normalise=math_row),
    "aime24": KnownDataset(
        hub="HuggingFaceH4/aime_2024", local="aime24/test.jsonl", normalise=math_row
    ),
    "aime25": KnownDataset(hub="math-ai/aime25", split="test", local="aime25/test.jsonl", normalise=math_row),
    "amc24": KnownDataset(hub="rawsh/2024_AMC12", local="amc24/train.jsonl", normalise=math_row),
    "amc23": KnownDataset(hub="math-ai/amc23", split="test", local="amc23/test.jsonl", normalise=math_row),
    "minerva-math": KnownDataset(
        hub="math-ai/minervamath", split="test", local="minerva_math/test.jsonl", normalise=math_row
    ),
    "math500": KnownDataset(
        hub="HuggingFaceH4/MATH-500", split="test", local="math500/test.jsonl", normalise=math_row
    ),
    "humaneval": KnownDataset(
        hub="openai/openai_humaneval", split="test", local="humaneval/HumanEval.jsonl", normalise=code_row
    ),
    "code-contests": KnownDataset(local="code_contests/test.jsonl", normalise=code_row),
    "leetcode": KnownDataset(local="leetcode/train.jsonl", normalise=code_row),
    "alfworld-train": KnownDataset(indices=ALFWORLD_TRAIN),
    "alfworld-valid": KnownDataset(indices=ALFWORLD_VALID),
    "webshop-train": KnownDataset(indices=WEBSHOP_TRAIN),
    "webshop-valid": KnownDataset(indices=WEBSHOP_VALID),
    "livecodebench-v5": KnownDataset(
        local="AReaL-boba-2-RL-Code/code_benchmark/lcb_v5/test.jsonl", normalise=code_row,
        fetch="hf download inclusionAI/AReaL-boba-2-RL-Code --repo-type dataset "
        "--local-dir <data root>/AReaL-boba-2-RL-Code",
    ),
}  # fmt: skip


def known(name: str) -> KnownDataset:
    """The entry of a name; ``DatasetError`` lists the known names."""
    if name not in KNOWN:
        raise DatasetError(f"no dataset is known as {name!r}; write one of {', '.join(KNOWN)}, or a path")
    return KNOWN[name]


def local_file(name: str) -> Path | None:
    """The file of a dataset on this disk, or None."""
    root, entry = os.environ.get(DATA_ROOT), known(name)
    path = Path(root, entry.local) if root and entry.local else None
    return path if path is not None and path.is_file() else None


def is_fetched(name: str) -> bool:
    """Whether opening the dataset would fetch from the hub."""
    entry = known(name)
    return entry.indices is None and entry.hub is not None and local_file(name) is None


def must_be_fetched_by_hand(name: str, setting: str) -> str:
    """The steps before the dataset can be opened, with the name of the ``setting``; empty when there are none."""
    entry = known(name)
    ready = entry.indices is not None or entry.hub is not None or local_file(name) is not None
    return "" if ready else how_to_get(name, setting)


def how_to_get(name: str, setting: str = "data.train.name") -> str:
    """The steps when a dataset is neither local nor on the hub; names id, key and path."""
    entry = known(name)
    root = os.environ.get(DATA_ROOT)
    place = Path(root or f"${DATA_ROOT}", entry.local)
    unset = "" if root else f" ({DATA_ROOT} is not set)"
    parts = [f"dataset {name!r} ({setting}): looked for {place}{unset}"]
    if entry.fetch:
        parts.append(
            f"it is not fetched automatically; run: {entry.fetch.replace('<data root>', str(root or f'${DATA_ROOT}'))}"
        )
    elif entry.hub is None:
        parts.append("no hub has this dataset; put the file there")
    else:
        where = (
            f"{entry.hub}, subset {entry.subset}, split {entry.split}"
            if entry.subset
            else f"{entry.hub}, split {entry.split}"
        )
        doubt = "" if entry.tried else "; this id has not been tried from here"
        parts.append(f"or on the hub as {where}{doubt}; a local file at that path replaces it")
    return "; ".join(parts)
