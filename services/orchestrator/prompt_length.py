"""Leaves out tasks whose prompt is longer than ``data.train.max_prompt_tokens``, and counts them.

What is counted is the text of the row as the models' tokenizers cut it, without chat template and instruction: the rule
depends on the data and not on how it is played. Only the package ``tokenizers`` is needed, no model. A task is kept
when it is short enough for every policy. Knows nothing about order or policies' work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from services.common.config.recipe import Recipe
from services.common.errors import DatasetError
from services.common.types import Task
from services.orchestrator.datasets import TaskSource

log = structlog.get_logger()

CountTokens = Callable[[list[str]], list[int]]

_TEXT_COLUMNS = ("messages", "prompt", "problem", "question")  # as the workflows look for a prompt
_ROWS_AT_ONCE = 512


class ShortPrompts:
    """The tasks of another source whose prompts have at most ``limit`` tokens; looked at once, when it is opened.

    Raises:
        DatasetError: a row has no prompt, or none is short enough.
    """

    def __init__(self, source: TaskSource, limit: int, counters: Sequence[CountTokens], field: str | None) -> None:
        self._source = source
        self._rows = [row for row, length in enumerate(_lengths(source, counters, field)) if length <= limit]
        self.num_left_out = len(source) - len(self._rows)
        if not self._rows:
            raise DatasetError(f"data.train.max_prompt_tokens: no prompt of {len(source)} has at most {limit} tokens")
        log.info("dataset.long_prompts", limit_tokens=limit, rows=len(self._rows), left_out=self.num_left_out)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Task:
        return self._source[self._rows[row]]


def with_short_prompts(source: TaskSource, recipe: Recipe, run_dir: Path) -> TaskSource:
    """The training tasks without those that are too long; as they are when the recipe sets no limit or trains nothing."""
    limit = recipe.data.train.max_prompt_tokens
    if limit is None or recipe.run.steps == 0:
        return source
    paths = {recipe.model_path(policy, run_dir): policy for policy in recipe.policies}
    counters = [open_tokenizer(path, f"policies.{policy}.model.path") for path, policy in paths.items()]
    return ShortPrompts(source, limit, counters, recipe.workflow.settings.get("prompt_field"))


def open_tokenizer(path: str, setting: str) -> CountTokens:
    """Counts tokens with the ``tokenizer.json`` in a model directory, or on the hub under that name.

    Raises:
        DatasetError: there is none; names the ``setting``.
    """
    try:
        from huggingface_hub import hf_hub_download
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DatasetError(
            "data.train.max_prompt_tokens needs the package `tokenizers`: pip install 'millrace[orchestrator]'"
        ) from error
    directory = Path(path).expanduser()
    try:
        file = str(directory / "tokenizer.json") if directory.is_dir() else hf_hub_download(path, "tokenizer.json")
        text = Path(file).read_text()
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"data.train.max_prompt_tokens: no tokenizer.json of {path} ({setting}): {error}; "
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
    names = (field,) if field else _TEXT_COLUMNS
    for name in names:
        value = row.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return "\n".join(str(message.get("content", "")) for message in value if isinstance(message, Mapping))
    raise DatasetError(f"{where} has no prompt to measure: looked for {', '.join(names)} in {sorted(row)}")


def _lengths(source: TaskSource, counters: Sequence[CountTokens], field: str | None) -> Iterator[int]:
    for begin in range(0, len(source), _ROWS_AT_ONCE):
        tasks = [source[row] for row in range(begin, min(begin + _ROWS_AT_ONCE, len(source)))]
        texts = [prompt_text(task.data, field, f"task {task.task_id}") for task in tasks]
        yield from map(max, zip(*(count(texts) for count in counters), strict=True))
