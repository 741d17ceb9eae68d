"""``millrace trajectories``: read real conversations of a run in the terminal.

Reads the journal, newest last, and decodes token ids with the run's own tokenizer. Policy tokens and environment tokens
are told apart by colour, exactly as they were sampled and read. Asks nothing but the disk: without the tokenizer's files
ids are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from services.cli.rows import Row
from services.cli.trace.reading import open_journal
from services.common.config.loading import load_resolved
from services.common.errors import ConfigError
from services.orchestrator.journal import records
from services.orchestrator.journal.rollouts import plain_trajectory


def read_trajectories(
    run_dir: Path,
    *,
    last: int,
    group: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
) -> list[Row]:
    """The newest trajectories of a run that match, oldest first; raises ``ConfigError`` when there is no journal."""
    chosen: list[Row] = []
    for row in _newest_first(run_dir, group):
        reward = row["reward"]
        if (min_reward is None or reward >= min_reward) and (max_reward is None or reward <= max_reward):
            chosen.append(row)
        if len(chosen) >= last:
            break
    return chosen[::-1]


def show(run_dir: Path, rows: list[Row], console: Console) -> None:
    """Print trajectories as conversations."""
    recipe = load_resolved(run_dir)
    tokenizers: dict[str, Any] = {}
    for row in rows:
        for sequence in row["sequences"]:
            policy = sequence["policy"]
            if policy not in tokenizers:
                tokenizers[policy] = _tokenizer(policy, recipe.model_path(policy, run_dir), console)
            console.print(_panel(row, sequence, tokenizers[policy]))


def _newest_first(run_dir: Path, group: str | None) -> Iterator[Row]:
    with closing(open_journal(run_dir)) as reader:
        found = list(reader.rows_of(records.TRAJECTORY))
        if not found:
            raise ConfigError(f"{run_dir} has no trajectories yet: no rollout has ended")
        for row in reversed(found):
            if group in (None, row.key.rpartition("/")[0]) and (record := reader.load(row)) is not None:
                yield plain_trajectory(record)


class _Ids:
    """Shows ids as numbers, where there is no tokenizer to decode them."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return f"[{' '.join(map(str, token_ids))}] "


def _tokenizer(policy: str, path: str, console: Console) -> Any:
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer

    try:
        # transformers asks the hub about a name even when told not to; a folder it only reads.
        folder = path if Path(path).is_dir() else snapshot_download(path, local_files_only=True)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:  # gone, cut off, or of a class that this version does not know
        console.print(
            f"The tokenizer of {policy} is not on this machine ({path}: {type(error).__name__}). Token ids are shown "
            "instead of text; put the model's directory back, or download the model, to read the text.",
            style="yellow",
            markup=False,
        )
        return _Ids()


def _panel(row: Row, sequence: Row, tokenizer: Any) -> Panel:
    text = Text()
    for segment in sequence["segments"]:
        policy = segment["source"] == "policy"
        text.append(_printable(tokenizer.decode(segment["token_ids"])), style="bold green" if policy else "dim")
    versions = sorted({s["weight_version"] for s in sequence["segments"] if s["source"] == "policy"})
    policy_tokens = sum(len(s["token_ids"]) for s in sequence["segments"] if s["source"] == "policy")
    facts = f"{policy_tokens} sampled tokens, weight versions {versions}, ended by {sequence['stop_reason']}"
    return Panel(
        Group(text, Text(facts, style="dim italic")),
        title=f"{row['task_group_id']}/{row['index']}  {sequence['policy']} as {sequence['role']}  reward {sequence['reward']:g}",
        title_align="left",
    )


def _printable(text: str) -> str:
    """The text with control characters shown: what a policy or a tool wrote sends nothing to the terminal."""
    return text.translate(_SHOWN)


_SHOWN = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
