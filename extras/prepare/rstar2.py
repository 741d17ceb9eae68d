"""Implements rStar2's ``process_train_dataset``: writes math problems of either column layout as jsonl of one form.

    {"prompt": [{"role": "user", "content": ...}], "reward_model": {"ground_truth": ...}}
    {"problem": ..., "answer": ...}
                                        --> {"problem": ..., "answer": ...}

Rows of neither layout and rows without an answer are left out, counted and named; a file without a usable row is
refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from services.common.config.data import DatasetConfig
from services.common.errors import DatasetError
from services.orchestrator.tasks.datasets import open_source
from services.orchestrator.tasks.rows import SkippedRows


@dataclass(frozen=True, slots=True)
class Processed:
    """Counts of the written file."""

    num_rows: int
    left_out: dict[str, SkippedRows]  # rows that cannot be used, by input


def process_train_dataset(inputs: Sequence[str], output: Path, subset: str | None = None) -> Processed:
    """Read jsonl or parquet files, saved datasets or hub names (of these the ``subset``), and write all rows into one jsonl
    file.

    The file appears under its name only when complete.

    Raises:
        DatasetError: an input is unreadable, or has no usable row.
    """
    if subset and all(Path(name).is_file() for name in inputs):
        raise DatasetError(f"--subset {subset} chooses a configuration of a hub dataset, and every input is a file")
    written = 0
    left_out: dict[str, SkippedRows] = {}
    partial = output.with_name(f"{output.name}.partial")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:
            for name in inputs:
                source = open_source(DatasetConfig(path=name, form="math", subset=subset), seed=0)
                left_out[name] = source.left_out
                for place in range(len(source)):
                    row = source[place].data
                    file.write(orjson.dumps({"problem": row["problem"], "answer": row["answer"]}) + b"\n")
                    written += 1
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return Processed(written, left_out)
