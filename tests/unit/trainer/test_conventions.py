"""Statements of docs/conventions.md about Rollmill hold, and its settings exist."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import get_args

import pytest
import torch

from services.common.config.algorithm import (
    LOSS_CLASSES,
    AdvantageName,
    AlgorithmConfig,
    DistillationConfig,
    RejectionConfig,
)
from services.trainer.advantages import sequence_advantages
from services.trainer.losses import gap_second_moments, keep_limit, kept_tokens, kl_per_token
from tests.unit.trainer.test_advantages import group

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


def test_the_epsilon_and_the_correction_have_the_documented_effect() -> None:
    half = [0.0, 0.001]
    assert abs(sequence_advantages(group(half), AlgorithmConfig())[0]) == pytest.approx(0.70, abs=0.005)
    with_trl = AlgorithmConfig(advantage_eps=1e-4)
    assert abs(sequence_advantages(group(half), with_trl)[0]) == pytest.approx(0.62, abs=0.005)
    eight = [1.0] * 4 + [0.0] * 4
    found = sequence_advantages(group(eight), AlgorithmConfig(advantage_eps=1e-12))
    assert found[0] == pytest.approx(0.94, abs=0.005), "1 with the population's deviation"


def test_ties_of_m2po_mask_stay_together() -> None:
    behaviour, proximal, mask = torch.full((4,), 0.2), torch.zeros(4), torch.ones(4, dtype=torch.bool)
    limit = keep_limit(gap_second_moments(behaviour, proximal, mask), 0.01)
    assert kept_tokens(behaviour, proximal, mask, limit).sum() == 4


def test_one_token_far_from_the_reference_has_the_documented_gradient() -> None:
    logprobs = torch.tensor([-20.0], dtype=torch.float64, requires_grad=True)
    estimate = kl_per_token(logprobs, torch.zeros(1, dtype=torch.float64), "k3")
    (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
    assert -gradient.item() == pytest.approx(math.exp(20.0))
