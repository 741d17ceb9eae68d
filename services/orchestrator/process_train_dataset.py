"""rStar2's ``process_train_dataset``: math problems in either column layout, written as jsonl of one form.

    {"prompt": [{"role": "user", "content": ...}], "reward_model": {"ground_truth": ...}}
    {"problem": ..., "answer": ...}
                                        --> {"problem": ..., "answer": ...}

Rows without an answer are left out and counted; a row of neither layout is refused with its number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from services.common.config.data import DatasetConfig
from services.orchestrator.datasets import open_source
from services.orchestrator.rows.math import math_row


@dataclass(frozen=True, slots=True)
class Processed:
    """What was written."""

    num_rows: int
    num_left_out: int  # without an answer


def process_train_dataset(inputs: Sequence[str], output: Path) -> Processed:
    """Read jsonl or parquet files, saved datasets or hub names, and write them all into one jsonl file.

    The file appears under its name only when it is complete.

    Raises:
        DatasetError: an input cannot be read, or a row is of neither layout.
    """
    written = left_out = 0
    partial = output.with_name(f"{output.name}.partial")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:
            for name in inputs:
                source = open_source(DatasetConfig(path=name), seed=0)
                for place in range(len(source)):
                    row = math_row(source[place].data, f"{name}, row {source[place].task_id}")
                    if row is None:
                        left_out += 1
                        continue
                    file.write(orjson.dumps({"problem": row["problem"], "answer": row["answer"]}) + b"\n")
                    written += 1
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return Processed(written, left_out)
