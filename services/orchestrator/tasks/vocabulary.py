"""Number of embedding rows of each policy, as far as known without its trainer.

A model has as many rows as its ``config.json`` says, padding included, so that number bounds its token ids; a tokenizer
may have fewer. Opens no model and fetches no file. The trainer reports an unknown number at its join.
"""

from __future__ import annotations

from pathlib import Path

import orjson
import structlog

from services.common.config.recipe import Recipe

log = structlog.get_logger()

CONFIG = "config.json"


def vocab_sizes(recipe: Recipe, run_dir: Path) -> dict[str, int | None]:
    """By policy; None without a ``config.json`` on this machine, or without the number there."""
    found = {policy: vocab_size(recipe.model_path(policy, run_dir)) for policy in recipe.policies}
    log.info("policies.vocabulary", sizes=found)
    return found


def vocab_size(model: str) -> int | None:
    """Of a model directory, or of a hub name that was fetched before."""
    file = _config_file(model)
    if file is None:
        return None
    try:
        config = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        log.warning("policies.unreadable_config", path=str(file), error=str(error))
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")  # of models that also see
    for section in (config, text if isinstance(text, dict) else {}):
        size = section.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None


def _config_file(model: str) -> Path | None:
    directory = Path(model)
    if directory.is_dir():
        return directory / CONFIG if (directory / CONFIG).is_file() else None
    if model.count("/") != 1 or model.startswith(("/", ".", "~")):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:  # an orchestrator alone may not have the package
        return None
    try:
        cached = try_to_load_from_cache(model, CONFIG)
    except HFValidationError:  # no hub name either: the trainer reports the number
        return None
    return Path(cached) if isinstance(cached, str) else None
