"""Leaves out tasks whose prompt is longer than their dataset's ``max_prompt_tokens``, and counts them.

Counts the tokens of the row's text by the models' tokenizers, without chat template and instruction: the rule depends
on the data and not on the workflow. Needs only the package ``tokenizers``, no model. A task stays when its prompt is
short enough for every policy. Independent of the order of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from services.common.config.data import is_training
from services.common.config.recipe import Recipe
from services.common.dataset_rows import PROMPT_FIELDS
from services.common.errors import DatasetError
from services.common.installing import install
from services.common.safetensors_files import config_of
from services.orchestrator.tasks.rows import SkippedRows, UsableRows

log = structlog.get_logger()
CountTokens = Callable[[list[str]], list[int]]
_ROWS_AT_ONCE = 512


def keep_short(
    source: UsableRows, limit: int, counters: Sequence[CountTokens], field: str | None, where: str
) -> UsableRows:
    """The tasks of another source with prompts of at most ``limit`` tokens.

    A task without a prompt counts as an unusable row. ``where`` names the dataset's section.

    Raises:
        DatasetError: no task has a prompt that is short enough.
    """
    kept: list[int] = []
    num_too_long = 0
    left_out = SkippedRows(source.left_out.count, list(source.left_out.reasons))
    for begin in range(0, len(source), _ROWS_AT_ONCE):
        texts: dict[int, str] = {}
        for row in range(begin, min(begin + _ROWS_AT_ONCE, len(source))):
            task = source[row]
            try:
                texts[row] = prompt_text(task.data, field, f"task {task.task_id}")
            except DatasetError as error:
                left_out.add(error.message)
        lengths = map(max, *(count(list(texts.values())) for count in counters), [0] * len(texts))
        short = [row for row, length in zip(texts, lengths, strict=True) if length <= limit]
        kept += short
        num_too_long += len(texts) - len(short)
    if not kept:
        others = f"; rows that cannot be used: {left_out}" if left_out.count else ""
        raise DatasetError(
            f"{where}.max_prompt_tokens: no prompt of {len(source)} has at most {limit} tokens: write a larger limit{others}"
        )
    log.info("dataset.long_prompts", dataset=where, limit_tokens=limit, rows=len(kept), left_out=num_too_long)
    return source.only(kept, left_out, num_too_long)


def short_prompts(sources: Mapping[str, UsableRows], recipe: Recipe, run_dir: Path) -> dict[str, UsableRows]:
    """Each dataset's tasks without those that are too long, by its section (``data.train``, ``data.evaluation.NAME``).

    A tokenizer is opened only where a section sets a limit; training data of a recipe without steps stay as they are.
    """
    sections = recipe.data.sections()
    trains = recipe.run.steps > 0
    limits = {
        where: sections[where].max_prompt_tokens if trains or not is_training(where) else None for where in sources
    }
    counters: list[CountTokens] = []
    if any(limit is not None for limit in limits.values()):
        paths = {recipe.model_path(policy, run_dir): policy for policy in recipe.policies}
        counters = [open_tokenizer(path, f"policies.{policy}.model.path") for path, policy in paths.items()]
    found = dict(sources)
    for where, limit in limits.items():
        if limit is not None:
            field = recipe.workflow_of(where).settings.get("prompt_field")
            found[where] = keep_short(sources[where], limit, counters, field, where)
    return found


def open_tokenizer(path: str, setting: str) -> CountTokens:
    """Counts tokens with the ``tokenizer.json`` in a model directory, or on the hub under that name.

    Raises:
        DatasetError: there is none; names the ``setting``.
    """
    try:
        from huggingface_hub import hf_hub_download
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DatasetError(f"max_prompt_tokens needs the package `tokenizers`: {install('orchestrator')}") from error
    directory = Path(path)
    try:
        file = str(directory / "tokenizer.json") if directory.is_dir() else hf_hub_download(path, "tokenizer.json")
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"max_prompt_tokens: no tokenizer.json of {path} ({setting}): {error}; "
            "name a model directory that holds one, or leave max_prompt_tokens out"
        ) from error
    tokenizer = Tokenizer.from_str(text)

    def count(texts: list[str]) -> list[int]:
        return [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    return count


def prompt_text(row: Mapping[str, Any], field: str | None, where: str) -> str:
    """The prompt of a row: a text, or the contents of its messages.

    >>> prompt_text({"messages": [{"role": "user", "content": "2+2?"}]}, None, "row 1")
    '2+2?'
    """
    names = (field,) if field else PROMPT_FIELDS
    for name in names:
        value = row.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return "\n".join(str(message.get("content", "")) for message in value if isinstance(message, Mapping))
    raise DatasetError(f"{where} has no prompt to measure: looked for {', '.join(names)} in {sorted(row)}")


# --- Number of embedding rows of each policy, as far as known without its trainer.


def vocab_sizes(recipe: Recipe, run_dir: Path) -> dict[str, int | None]:
    """By policy; None without a ``config.json`` on this machine, or without the number there."""
    found = {policy: vocab_size(recipe.model_path(policy, run_dir)) for policy in recipe.policies}
    log.info("policies.vocabulary", sizes=found)
    return found


def vocab_size(model: str) -> int | None:
    """Of a model directory, or of a hub name that was fetched before."""
    config = config_of(model)
    text = config.get("text_config")  # of models that also see
    for section in (config, text if isinstance(text, dict) else {}):
        size = section.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None
