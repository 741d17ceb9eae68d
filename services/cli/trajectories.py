"""``millrace trajectories``: read real conversations of a run in the terminal.

Reads the journal's segments directly (they are plain jsonl), newest last, and decodes token ids with the run's own
tokenizer. Policy tokens and environment tokens are told apart by colour, exactly as they were sampled and read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from services.cli.rows import Row, read_rows
from services.cli.run_state import check_run_directory
from services.common.config.loading import load_resolved
from services.common.errors import ConfigError


def read_trajectories(
    run_dir: Path,
    *,
    last: int,
    group: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
) -> list[Row]:
    """The newest trajectories of a run that match, oldest first; raises ``ConfigError`` when there is no journal."""
    chosen: deque[Row] = deque(maxlen=last)
    for row in _rows(run_dir):
        reward = row.get("reward")
        if reward is None or (group is not None and row["task_group_id"] != group):
            continue
        if (min_reward is None or reward >= min_reward) and (max_reward is None or reward <= max_reward):
            chosen.append(row)
    return list(chosen)


def show(run_dir: Path, rows: list[Row], console: Console) -> None:
    """Print trajectories as conversations."""
    recipe = load_resolved(run_dir)
    tokenizers: dict[str, Any] = {}
    for row in rows:
        for sequence in row["sequences"]:
            policy = sequence["policy"]
            if policy not in tokenizers:
                tokenizers[policy] = _tokenizer(recipe.model_path(policy, run_dir))
            console.print(_panel(row, sequence, tokenizers[policy]))


def _rows(run_dir: Path) -> Iterator[Row]:
    segments = sorted((run_dir / "journal").rglob("*.jsonl"))
    if not segments:
        check_run_directory(run_dir)
        raise ConfigError(f"{run_dir} has no trajectories yet: no rollout has ended")
    for segment in segments:
        yield from read_rows(segment)


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _panel(row: Row, sequence: Row, tokenizer: Any) -> Panel:
    text = Text()
    for segment in sequence["segments"]:
        policy = segment["source"] == "policy"
        text.append(tokenizer.decode(segment["token_ids"]), style="bold green" if policy else "dim")
    versions = sorted({s["weight_version"] for s in sequence["segments"] if s["source"] == "policy"})
    policy_tokens = sum(len(s["token_ids"]) for s in sequence["segments"] if s["source"] == "policy")
    facts = f"{policy_tokens} sampled tokens, weight versions {versions}, ended by {sequence['stop_reason']}"
    return Panel(
        Group(text, Text(facts, style="dim italic")),
        title=f"{row['task_group_id']}/{row['index']}  {sequence['policy']} as {sequence['role']}  reward {sequence['reward']:g}",
        title_align="left",
    )
