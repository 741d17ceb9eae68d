"""``rollmill trajectories``: prints conversations of a run, with roles and the expected answer.

Reads the journal, newest last, and decodes token ids with the run's tokenizer. Turns that the policy wrote are marked and
coloured. Reads only the disk; prints ids without the tokenizer's files.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.cli.console import say
from services.cli.inspect.run_state import Row
from services.cli.inspect.trace.reading import open_journal
from services.cli.inspect.turns import POLICY, Marks, marks_of, turns
from services.common.config.reading.loading import load_resolved
from services.common.errors import ConfigError
from services.common.records.dataset_rows import truth_in
from services.common.records.types import TokenSource
from services.common.telemetry.logs import escaped
from services.orchestrator.journal import records
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.rollouts import plain_trajectory

_MOST_CHARACTERS = 600  # of an expected answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which trajectories to show; all that is given must hold."""

    last: int = 5
    group: str | None = None
    task: str | None = None
    """A task id, or a pattern with ``*``."""
    step: int | None = None
    """Trained in this training step of any policy."""
    evaluation: str | None = None
    """Played for this evaluation, such as ``end`` or ``end/greedy``."""
    min_reward: float | None = None
    max_reward: float | None = None

    def reward_fits(self, reward: float) -> bool:
        return (self.min_reward is None or reward >= self.min_reward) and (
            self.max_reward is None or reward <= self.max_reward
        )


def read_trajectories(run_dir: Path, wanted: Wanted) -> list[Row]:
    """The newest trajectories of a run that match, oldest first, each with ``issue``, the record of its task group.

    Raises ``ConfigError`` when there is no journal, and for a training step without a recorded batch.
    """
    chosen: list[Row] = []
    with closing(open_journal(run_dir)) as reader:
        groups = _groups_of_step(reader, wanted.step) if wanted.step is not None else None
        found = list(reader.rows_of(records.TRAJECTORY))
        if not found:
            raise ConfigError(f"{run_dir} has no trajectories yet: no rollout has ended")
        issues = _Issues(reader)
        for row in reversed(found):
            name = row.key.rpartition("/")[0]
            if wanted.group not in (None, name) or (groups is not None and name not in groups):
                continue
            issue = issues[name]
            if not _issue_fits(issue, wanted) or (record := reader.load(row)) is None:
                continue
            if wanted.reward_fits(record["reward"]):
                chosen.append({**plain_trajectory(record), "issue": issue})
            if len(chosen) >= wanted.last:
                break
    return chosen[::-1]


class _Issues:
    """The record of each task group, read when asked for."""

    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader
        self._rows = {row.key: row for row in reader.rows_of(records.GROUP)}
        self._read: dict[str, Row] = {}

    def __getitem__(self, name: str) -> Row:
        if name not in self._read:
            row = self._rows.get(name)
            self._read[name] = (self._reader.load(row) or {}) if row is not None else {}
        return self._read[name]


def _groups_of_step(reader: JournalReader, step: int) -> set[str]:
    found: set[str] = set()
    batches = [row for row in reader.rows_of(records.BATCH) if row.key.rpartition("/")[2] == str(step)]
    if not batches:
        raise ConfigError(f"no batch of training step {step} is recorded: `rollmill trace RUN --list` shows steps")
    for row in batches:
        record = reader.load(row) or {}
        found |= {sequence["sequence_id"].split("/")[0] for sequence in record.get("sequences", ())}
    return found


def _issue_fits(issue: Row, wanted: Wanted) -> bool:
    evaluation = str(issue.get("evaluation", ""))
    if wanted.evaluation is not None and wanted.evaluation not in (evaluation, evaluation.partition("/")[0]):
        return False
    return wanted.task is None or fnmatch.fnmatchcase(str(issue.get("task_id", "")), wanted.task)


def show(run_dir: Path, rows: list[Row], console: Console, *, raw: bool = False) -> None:
    """Print trajectories as conversations; with ``raw``, the text as the policy read and wrote it, special tokens included."""
    recipe = load_resolved(run_dir)
    decoders: dict[str, tuple[Any, Marks]] = {}
    for row in rows:
        for sequence in row["sequences"]:
            policy = sequence["policy"]
            if policy not in decoders:
                tokenizer = _tokenizer(policy, recipe.model_path(policy, run_dir), console)
                decoders[policy] = tokenizer, Marks({}, ()) if raw else marks_of(tokenizer)
            console.print(_panel(row, sequence, *decoders[policy], raw=raw))


class _Ids:
    """Shows ids as numbers, where there is no tokenizer to decode them."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return f"[{' '.join(map(str, token_ids))}] "


def load_tokenizer(policy: str, path: str) -> Any:
    """The tokenizer of a policy from the disk; no host is asked. Raises ``ConfigError`` where it cannot be loaded."""
    import transformers
    from huggingface_hub import snapshot_download

    try:
        # transformers asks the hub about a name even when told not to; a folder it only reads.
        folder = path if Path(path).is_dir() else snapshot_download(path, local_files_only=True)
        # The one class reads this file alone; the other one's import takes four times as long.
        kind = "PreTrainedTokenizerFast" if (Path(folder) / "tokenizer.json").is_file() else "AutoTokenizer"
        return getattr(transformers, kind).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:  # gone, cut off, or of a class that this version does not know
        raise ConfigError(
            f"The tokenizer of {policy} is not on this machine ({path}: {type(error).__name__}). Token ids are shown "
            "instead of text; put the model's directory back, or download the model, to read the text."
        ) from None


def _tokenizer(policy: str, path: str, console: Console) -> Any:
    try:
        return load_tokenizer(policy, path)
    except ConfigError as error:
        say(console, error.message, "yellow")
        return _Ids()


def _panel(row: Row, sequence: Row, tokenizer: Any, marks: Marks, *, raw: bool) -> Panel:
    segments = [(s["source"] == TokenSource.POLICY, tokenizer.decode(s["token_ids"])) for s in sequence["segments"]]
    issue = row.get("issue", {})
    parts: list[Any] = [_text(segments) if raw else _turns(segments, marks, sequence["policy"])]
    if answer := expected(issue):
        parts.append(Text.assemble(("expected  ", "bold"), (escaped(answer), "italic")))
    versions = sorted({s["weight_version"] for s in sequence["segments"] if s["source"] == TokenSource.POLICY})
    policy_tokens = sum(len(s["token_ids"]) for s in sequence["segments"] if s["source"] == TokenSource.POLICY)
    facts = f"{policy_tokens} sampled tokens, weight versions {versions}, ended by {sequence['stop_reason']}"
    # The reward comes early: a narrow terminal cuts the end.
    title = (
        f"{row['task_group_id']}/{row['index']}",
        f"reward {sequence['reward']:g}",
        f"task {issue['task_id']}" if issue.get("task_id") else "",
        f"{sequence['policy']} as {sequence['role']}",
        _lineage(row, sequence),
        f"evaluation {issue['evaluation']}" if issue.get("evaluation") else "",
    )
    return Panel(
        Group(*parts, Text(facts, style="dim italic")),
        title=Text(escaped("  ".join(part for part in title if part))),
        title_align="left",
    )


def _lineage(row: Row, sequence: Row) -> str:
    """The number of a sequence among several of its rollout, and the number of its parent."""
    if len(row["sequences"]) == 1:
        return ""
    number = next(i for i, each in enumerate(row["sequences"]) if each is sequence)
    parent = sequence.get("parent")
    return f"sequence {number}" + ("" if parent is None else f", {sequence['origin']} of {parent}")


def _text(segments: Sequence[tuple[bool, str]]) -> Text:
    text = Text()
    for by_policy, part in segments:
        text.append(escaped(part), style="bold green" if by_policy else "dim")
    return text


def _turns(segments: Sequence[tuple[bool, str]], marks: Marks, policy: str) -> Table:
    """A row for each turn, with its role; what the policy wrote also has a mark, for terminals without colours."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for turn in turns(segments, marks):
        by_policy = turn.role == POLICY
        role = Text(
            f"» {escaped(policy)}" if by_policy else f"  {turn.role}", style="bold green" if by_policy else "bold"
        )
        table.add_row(role, Text(escaped(turn.text), style="green" if by_policy else ""))
    return table


def expected(issue: Row) -> str:
    """The reference answer of the task's row, or the first of its tests; empty where the row has neither."""
    try:
        data = json.loads(issue.get("data_json", "{}"))
    except json.JSONDecodeError:
        return ""
    if not isinstance(data, dict):
        return ""
    truth = truth_in(data)
    if truth is None and isinstance(data.get("tests"), dict) and (cases := data["tests"].get("cases")):
        truth = f"{json.dumps(cases[0])}, the first of {len(cases)} tests"
    told = "" if truth is None else str(truth)
    return told if len(told) <= _MOST_CHARACTERS else f"{told[:_MOST_CHARACTERS]}…"
