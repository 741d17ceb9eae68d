"""A Hugging Face export at the end of a run: config, safetensors, tokenizer, loadable with ``from_pretrained``.

It is what `millrace export` makes of the last checkpoint. Where there is none, because the disk did not take it, or where
transformers stores the model's weights under other names than it computes with (experts), they are gathered instead.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError

from services.common.checkpoints.export import export_checkpoint
from services.common.errors import InfrastructureError, MillraceError
from services.common.models import named_weights
from services.trainer.model import PolicyModel
from services.trainer.sharding import Ranks, full_weights

log = structlog.get_logger()


class ExportFailedError(InfrastructureError):
    """The disk did not take an export; the checkpoint holds the same weights."""


def export_last(
    model: PolicyModel, tokenizer: Any, directory: Path, ranks: Ranks, dtype: torch.dtype, checkpoint: Path
) -> None:
    """Export the model, which is as ``checkpoint`` has it if that is there. A collective.

    Raises:
        ExportFailedError: on the first rank.
    """
    copied = ranks.is_first and checkpoint.is_dir() and _has_stored_names(model.causal_lm)
    if not int(ranks.max(torch.tensor(int(copied), device=ranks.device))):
        export(model, tokenizer, directory, ranks, dtype)
    elif ranks.is_first:
        try:
            export_checkpoint(checkpoint, directory, replace=True)
        except (OSError, MillraceError) as error:
            raise ExportFailedError(f"{directory}: {error}") from error
        log.info("model.exported", path=str(directory), checkpoint=str(checkpoint))


def export(model: PolicyModel, tokenizer: Any, directory: Path, ranks: Ranks, dtype: torch.dtype) -> None:
    """Gather the model and write it in ``dtype``; the directory appears when it is complete. A collective.

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


def model_files(causal_lm: Any, tokenizer: Any, dtype: str) -> dict[str, bytes]:
    """Config, generation config and tokenizer by name of the file; the config says that weights are in ``dtype``."""
    config = copy.deepcopy(causal_lm.config)
    config.dtype = dtype
    config.architectures = [type(causal_lm).__name__.removeprefix("FSDP")]  # sharding renames classes
    with tempfile.TemporaryDirectory(prefix="millrace-model-") as made:
        directory = Path(made)
        config.save_pretrained(directory)
        if causal_lm.can_generate():
            causal_lm.generation_config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def _has_stored_names(causal_lm: Any) -> bool:
    """Whether transformers stores weights as it computes with them."""
    from transformers.core_model_loading import revert_weight_conversion

    weights = {name: torch.empty(w.shape, device="meta") for name, w in named_weights(causal_lm).items()}
    return set(revert_weight_conversion(causal_lm, weights)) == set(weights)


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
