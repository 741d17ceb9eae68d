"""docs/algorithms.md names every loss, and its examples are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from services.common.config.algorithm import (
    IMPORT_PATH,
    LOSS_CLASSES,
)
from services.common.config.training import (
    PolicyConfig,
)
from services.trainer.losses import ALGORITHMS
from tests.unit.trainer.building import algorithm, rank_batch, train_step, training_sequences

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
PROSE = re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)
WORDS = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]+)`", PROSE))))


def test_every_loss_has_an_implementation() -> None:
    assert set(LOSS_CLASSES) - {IMPORT_PATH} == set(ALGORITHMS)
    assert set(ALGORITHMS) <= WORDS


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
