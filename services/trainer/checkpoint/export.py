"""Writes a Hugging Face export at the end of a run: config, safetensors, tokenizer, loadable with ``from_pretrained``.

The export converts the last checkpoint, as `rollmill export` does. Without a checkpoint (a full disk), or when transformers
stores weights under other names than the model uses (experts), the first rank gathers the weights instead.
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

from services.common.checkpoints.adapters import adapter_files
from services.common.checkpoints.export import export_checkpoint
from services.common.errors import InfrastructureError, RollmillError
from services.common.text.huggingface import named_weights
from services.trainer.model.policy_model import PolicyModel
from services.trainer.ranks.sharding import Ranks, full_weights

log = structlog.get_logger()


class ExportFailedError(InfrastructureError):
    """The disk refused an export; the checkpoint holds the same weights."""


def export_last(
    model: PolicyModel, tokenizer: Any, directory: Path, ranks: Ranks, dtype: torch.dtype, checkpoint: Path
) -> None:
    """Export the model, from ``checkpoint`` if that exists. A collective. An adapter is merged into its base.

    Raises:
        ExportFailedError: on the first rank.
    """
    copied = ranks.is_first and checkpoint.is_dir() and _has_stored_names(model.causal_lm)
    if not int(ranks.max(torch.tensor(int(copied), device=ranks.device))):
        if model.adapter is not None:
            raise ExportFailedError(
                f"{directory}: there is no checkpoint {checkpoint}, from which an adapter is merged"
            )
        export(model, tokenizer, directory, ranks, dtype)
    elif ranks.is_first:
        try:
            export_checkpoint(checkpoint, directory, replace=True)
        except (OSError, RollmillError) as error:
            raise ExportFailedError(f"{directory}: {error}") from error
        log.info("model.exported", path=str(directory), checkpoint=str(checkpoint))


def export(model: PolicyModel, tokenizer: Any, directory: Path, ranks: Ranks, dtype: torch.dtype) -> None:
    """Gather the model and write the weights in ``dtype``; the directory appears when complete. A collective.

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


def checkpoint_files(model: PolicyModel, tokenizer: Any, publish_dtype: str) -> dict[str, bytes]:
    """The files that a checkpoint needs for exports: config and tokenizer, and those about an adapter and its base."""
    if model.adapter is None or model.base is None:
        return model_files(model.causal_lm, tokenizer, publish_dtype)
    base = model.base
    files = model_files(model.causal_lm, tokenizer, base.dtype)
    return files | adapter_files(model.adapter, base.path, base.dtype, base.tensors)


def model_files(causal_lm: Any, tokenizer: Any, dtype: str) -> dict[str, bytes]:
    """Config, generation config and tokenizer by file name; the config states ``dtype``."""
    config = copy.deepcopy(causal_lm.config)
    config.dtype = dtype
    config.architectures = [type(causal_lm).__name__.removeprefix("FSDP")]  # sharding renames classes
    with tempfile.TemporaryDirectory(prefix="rollmill-model-") as made:
        directory = Path(made)
        config.save_pretrained(directory)
        if causal_lm.can_generate():
            causal_lm.generation_config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def _has_stored_names(causal_lm: Any) -> bool:
    """Whether transformers stores the weights under the names of the model's parameters."""
    from transformers.core_model_loading import revert_weight_conversion

    weights = {name: torch.empty(w.shape, device="meta") for name, w in named_weights(causal_lm).items()}
    return set(revert_weight_conversion(causal_lm, weights)) == set(weights)


def save_weights(causal_lm: Any, directory: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write config and safetensors of a model, without transformers' progress bar in the logs.

    ``weights`` replace the model's own; the config names their type.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = next(iter(weights.values())).dtype if weights else None
    causal_lm.save_pretrained(directory, state_dict=weights)  # this may empty ``weights``
    if dtype is not None:
        # The config still names the type of the master weights.
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        config.dtype = dtype
        config.save_pretrained(directory)
