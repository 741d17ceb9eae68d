"""docs/algorithms.md names every loss, advantage and setting there is, and its examples are valid."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from services.common.config.algorithm import (
    IMPORT_PATH,
    LOSS_CLASSES,
    DistillationConfig,
    ValueHeadConfig,
)
from services.common.config.base import Section
from services.common.config.training import (
    BatchConfig,
    OverlongPenaltyConfig,
    PolicyConfig,
    ReplayConfig,
    ResampleConfig,
)
from services.orchestrator.buffer.buffer import quotas
from services.trainer.losses import ALGORITHMS, TokenBatch, algorithm_of
from tests.unit.trainer.building import algorithm, rank_batch, train_step, training_sequences

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
PROSE = re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)
WORDS = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]+)`", PROSE))))


def test_every_loss_has_an_implementation() -> None:
    assert set(LOSS_CLASSES) - {IMPORT_PATH} == set(ALGORITHMS)
    assert set(ALGORITHMS) <= WORDS


@pytest.mark.parametrize(
    "section",
    [
        *LOSS_CLASSES.values(),
        BatchConfig,
        ResampleConfig,
        OverlongPenaltyConfig,
        ReplayConfig,
        ValueHeadConfig,
        DistillationConfig,
    ],
)
def test_every_setting_is_documented(section: type[Section]) -> None:
    assert not set(section.model_fields) - WORDS


def test_the_example_is_a_valid_policy() -> None:
    policy = example_policy(0)
    assert (policy.algorithm.name, policy.batch.minibatches) == ("m2po", 4)


def test_the_examples_of_a_value_head_and_of_a_teacher_are_valid_policies() -> None:
    critic, student = example_policy(2).algorithm, example_policy(3).algorithm
    assert critic.value_head is not None and critic.value_head.lr == 1e-5
    assert student.distillation is not None and student.distillation.task_coefficient == 0.0


def example_policy(index: int) -> PolicyConfig:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    return PolicyConfig.model_validate(yaml.safe_load(blocks[index])["policies"]["model0"])


def test_the_loss_of_the_page_trains_and_is_ppo_where_both_widths_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "my_losses.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = example_policy(1).algorithm
    batch = rank_batch(training_sequences(8))
    own = train_step(config).run(batch)
    assert own.updates_applied == 1 and own.grad_norm > 0 and 0 <= own.algorithm["clipped_share"] <= 1
    same = config.model_copy(update={"settings": {"eps": 0.2, "eps_negative": 0.2}})
    ppo = train_step(algorithm("ppo_clip")).run(batch)
    assert train_step(same).run(batch).grad_norm == pytest.approx(ppo.grad_norm)


def test_the_table_of_quotas_is_what_is_kept() -> None:
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith(("| right ones", "| kept"))]
    for right, kept in zip(lines[0][1:], lines[1][1:], strict=True):
        for number in range(int(right.split("–")[0]), int(right.split("–")[-1]) + 1):
            assert quotas(32 - number, number, 16) == tuple(int(n) for n in kept.split(" + "))


def test_the_table_of_clipped_shares_is_what_the_losses_clip() -> None:
    """The rule of the authors of M2PO clips far less than that of the paper."""
    rows = re.findall(r"^\| (`(?:m2po|authors|ppo_clip)`[^|]*) \| ([\d.]+)% \|$", PAGE, flags=re.MULTILINE)
    settings: list[dict[str, object]] = [
        {"name": "m2po"},
        {"name": "m2po", "m2po_rule": "authors", "m2po_threshold": 0.01, "m2po_floor_low": 0, "m2po_floor_high": 0},
        {"name": "m2po", "m2po_rule": "authors", "m2po_threshold": 0.01},
        {"name": "m2po", "m2po_rule": "authors"},
        {"name": "ppo_clip", "eps_clip": 0.2, "eps_clip_higher": 0.28},
    ]
    rng, count = np.random.default_rng(0), 400_000
    tokens = TokenBatch(
        logprobs=torch.tensor(rng.normal(0.0, 0.2, count)),
        behaviour=torch.zeros(count, dtype=torch.float64),
        advantages=torch.tensor(rng.choice([-1.0, 1.0], count)),
        mask=torch.ones(count, dtype=torch.bool),
        sequence_index=torch.zeros(count, dtype=torch.int64),
        num_sequences=1,
    )
    for (row, share), section in zip(rows, settings, strict=True):
        config = algorithm(**section)  # type: ignore[arg-type]
        found = algorithm_of(config).loss(tokens, config).counts["clipped_tokens"].item() / count
        assert 100 * found == pytest.approx(float(share), rel=0.04), row
