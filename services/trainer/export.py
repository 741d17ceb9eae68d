"""A Hugging Face export: config, safetensors, tokenizer, loadable with ``from_pretrained``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError

from services.common.errors import InfrastructureError
from services.trainer.model import PolicyModel
from services.trainer.sharding import Ranks, full_weights

log = structlog.get_logger()


class ExportFailedError(InfrastructureError):
    """The disk did not take an export; the checkpoint holds the same weights."""


def export(model: PolicyModel, tokenizer: Any, directory: Path, ranks: Ranks, dtype: torch.dtype) -> None:
    """Write the model in ``dtype``; the directory appears when it is complete. A collective.

    Raises:
        ExportFailedError: on the first rank.
    """
    weights = {name: weight for name, weight in full_weights(model.causal_lm, ranks, dtype) if weight is not None}
    if not ranks.is_first:
        return
    partial = directory.with_name(f"{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_weights(model.causal_lm, partial, weights)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ExportFailedError(f"{directory}: {error}") from error
    log.info("model.exported", path=str(directory))


def save_weights(causal_lm: Any, directory: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Config and safetensors of a model, without the progress bar that transformers draws into logs.

    ``weights`` are written in place of the model's own, and the config names their type.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = next(iter(weights.values())).dtype if weights else None
    causal_lm.save_pretrained(directory, state_dict=weights)  # which may leave nothing in ``weights``
    if dtype is not None:
        # The config still names the type of the master weights.
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        config.dtype = dtype
        config.save_pretrained(directory)
