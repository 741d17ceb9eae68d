"""The export is an ordinary Hugging Face directory with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.text.chat import load_tokenizer
from services.trainer.checkpoints import ExportFailedError, export
from services.trainer.model.policy_model import load_policy_model
from services.trainer.ranks import Ranks
from tests.unit.trainer_service.building import save_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_gives_the_weights_back(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    source = save_model(tmp_path / "model", tied=tied)
    model, tokenizer = load_policy_model(source, Ranks.single()), load_tokenizer(source)
    target = tmp_path / "export" / "model0"
    for _ in range(2):  # exporting again replaces what is there
        export(model, tokenizer, target, Ranks.single(), dtype)

    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.dtype is dtype
    own = dict(model.causal_lm.named_parameters())
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, own[name].to(dtype)), name
    assert AutoTokenizer.from_pretrained(target).get_vocab() == tokenizer.get_vocab()
    assert AutoTokenizer.from_pretrained(target).chat_template == tokenizer.chat_template
    assert not target.with_name("model0.partial").exists()


def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    (tmp_path / "export").write_text("a file where a directory must be")
    with pytest.raises(ExportFailedError, match="export"):
        export(
            load_policy_model(source, Ranks.single()),
            load_tokenizer(source),
            tmp_path / "export" / "model0",
            Ranks.single(),
            torch.float32,
        )
