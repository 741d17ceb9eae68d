"""Statements of docs/conventions.md about Rollmill hold, and its settings exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from services.common.config.algorithm import (
    LOSS_CLASSES,
    AdvantageName,
    DistillationConfig,
    RejectionConfig,
)

PAGE = (Path(__file__).parents[3] / "docs" / "conventions.md").read_text()
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ") and "|---" not in line]


def test_every_row_has_a_cell_for_each_system() -> None:
    assert ROWS[0][1:] == [" Rollmill ", " verl ", " AReaL ", " TRL ", " prime-rl "]
    assert len(ROWS) > 25 and {len(row) for row in ROWS} == {6}


def test_the_settings_of_our_column_exist() -> None:
    named = set(re.findall(r"`([a-z_0-9]+)(?:: [a-z]+)?`", " ".join(row[1] for row in ROWS)))
    fields = {name for section in LOSS_CLASSES.values() for name in section.model_fields}
    metrics = {"ended_share"}
    values = {"kept", "suffix", "authors", "k3", "k3_reverse", "k3_straight_through", "sequence", "sequence_mean", "factor",
              "constant", "sum", "token_mean"}  # fmt: skip
    known = (
        fields
        | set(RejectionConfig.model_fields)
        | set(DistillationConfig.model_fields)
        | set(LOSS_CLASSES)
        | set(get_args(AdvantageName))
    )
    assert named - known - metrics - values == set()
