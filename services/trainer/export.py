"""A Hugging Face export: config, safetensors, tokenizer, loadable with ``from_pretrained``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import structlog
import torch

from services.trainer.model import PolicyModel
from services.trainer.sharding import Ranks, full_weights

log = structlog.get_logger()


def export(model: PolicyModel, tokenizer: Any, directory: Path, ranks: Ranks, dtype: torch.dtype) -> None:
    """Write the model in ``dtype``; the directory appears when it is complete. A collective."""
    weights = dict(full_weights(model.causal_lm, ranks, dtype))
    if not ranks.is_first:
        return
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.causal_lm.save_pretrained(partial, state_dict=weights)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    log.info("model.exported", path=str(directory))
