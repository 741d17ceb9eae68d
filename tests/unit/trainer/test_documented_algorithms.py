"""docs/algorithms.md names every loss, advantage and setting there is, and its examples are valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from services.common.config.algorithm import (
    AdvantageName,
    AlgorithmConfig,
    KlEstimator,
    LossAggregation,
    LossName,
    M2poScope,
)
from services.common.config.policy import (
    BatchConfig,
    OverlongPenaltyConfig,
    PolicyConfig,
    ReplayConfig,
    ResampleConfig,
)
from services.orchestrator.buffer.resample import quotas
from services.trainer.algorithms import ALGORITHMS

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
PROSE = re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)
WORDS = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]+)`", PROSE))))


def test_every_loss_has_an_implementation() -> None:
    assert set(get_args(LossName)) == set(ALGORITHMS)


@pytest.mark.parametrize("names", [LossName, AdvantageName, LossAggregation, KlEstimator, M2poScope])
def test_every_name_is_documented(names: object) -> None:
    assert not set(get_args(names)) - WORDS


@pytest.mark.parametrize("section", [AlgorithmConfig, BatchConfig, ResampleConfig, OverlongPenaltyConfig, ReplayConfig])
def test_every_setting_is_documented(section: type[AlgorithmConfig]) -> None:
    assert not set(section.model_fields) - WORDS


def test_the_example_is_a_valid_policy() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    policy = PolicyConfig.model_validate(yaml.safe_load(block)["policies"]["model0"])
    assert (policy.algorithm.name, policy.batch.minibatches) == ("m2po", 4)


def test_the_table_of_quotas_is_what_is_kept() -> None:
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith(("| right ones", "| kept"))]
    for right, kept in zip(lines[0][1:], lines[1][1:], strict=True):
        for number in range(int(right.split("–")[0]), int(right.split("–")[-1]) + 1):
            assert quotas(32 - number, number, 16) == tuple(int(n) for n in kept.split(" + "))
