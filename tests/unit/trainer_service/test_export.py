"""The export of a model whose experts have other names in files is an ordinary Hugging Face directory with its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.safetensors_files import weight_files
from services.common.text.chat import load_tokenizer
from services.trainer.checkpoints import export_under_names_of_files, has_other_names_in_files
from services.trainer.model.policy_model import load_policy_model
from services.trainer.ranks import Ranks
from tests.unit.trainer.building import tiny_causal_lm, tiny_experts
from tests.unit.trainer_service.building import save_model


def test_experts_are_exported_under_the_names_that_other_programs_read(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    tokenizer = load_tokenizer(source)
    tiny_experts().save_pretrained(tmp_path / "experts")
    model = load_policy_model(tmp_path / "experts", Ranks.single())
    assert has_other_names_in_files(model.causal_lm) and not has_other_names_in_files(tiny_causal_lm())
    target = tmp_path / "export" / "model0"
    for _ in range(2):  # exporting again replaces what is there
        export_under_names_of_files(model, tokenizer, target, Ranks.single(), torch.bfloat16)
    assert weight_files(target).keys() == weight_files(tmp_path / "experts").keys()
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(target)
    own = dict(model.causal_lm.named_parameters())
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, own[name].to(torch.bfloat16)), name
    assert AutoTokenizer.from_pretrained(target).get_vocab() == tokenizer.get_vocab()
    (tmp_path / "file").write_text("a file where a directory must be")
    with pytest.raises(OSError, match="file"):
        export_under_names_of_files(model, tokenizer, tmp_path / "file" / "model0", Ranks.single(), torch.bfloat16)
