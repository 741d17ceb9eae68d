"""``rollmill trajectories``: prints conversations of a run, with roles and the expected answer.

Reads the journal, newest last, and decodes token ids with the run's tokenizer; without its files ids are shown. The marks of a
chat template (``<|im_start|>user`` and alike) are found by rendering a short dialogue of known texts. The marks split only text
that the policy read; text that the policy wrote is one turn, also with imitated marks.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.cli.console import say
from services.cli.inspect.run_model import open_journal
from services.cli.inspect.run_state import Row
from services.common.config.loading import load_resolved
from services.common.dataset_rows import truth_in
from services.common.errors import ConfigError
from services.common.records import TokenSource
from services.common.telemetry.logs import escaped
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import plain_trajectory
from services.orchestrator.journal.reader import JournalReader

POLICY, PROMPT, ENVIRONMENT = "policy", "prompt", "environment"
"""Roles of turns for which the template has no role; ``POLICY`` of all text that a policy wrote."""

_USER, _ASSISTANT, _AGAIN, _OTHER = "@@user@@", "@@assistant@@", "@@again@@", "@@other@@"


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Marks:
    """The text that a chat template writes around the turns of each role."""

    headers: Mapping[str, str]  # by role; none is empty
    ends: tuple[str, ...]  # longest first


def marks_of(tokenizer: Any) -> Marks:
    """The marks of a tokenizer's chat template; none without a template, or where it refuses a dialogue."""
    user, assistant, again = (("user", _USER), ("assistant", _ASSISTANT), ("user", _AGAIN))
    whole = _rendered(tokenizer, [user, assistant, again])
    if not all(mark in whole for mark in (_USER, _ASSISTANT, _AGAIN)):
        return Marks({}, ())
    before, rest = whole.split(_USER, 1)
    between, rest = rest.split(_ASSISTANT, 1)
    back, end_of_user = rest.split(_AGAIN, 1)
    header_of_user = _common_prefix(before[::-1], back[::-1])[::-1]
    end_of_assistant = back.removesuffix(header_of_user)
    end_of_user = _common_prefix(between, end_of_user)
    headers = {"user": header_of_user, "assistant": between.removeprefix(end_of_user)}
    ends = {end_of_user, end_of_assistant}
    with_system = _rendered(tokenizer, [("system", _OTHER), user])
    if _OTHER in with_system and _USER in with_system:
        headers["system"], rest = with_system.split(_OTHER, 1)
        ends.add(rest.split(_USER, 1)[0].removesuffix(header_of_user))
    with_tool = _rendered(tokenizer, [user, assistant, ("tool", _OTHER)])
    if _ASSISTANT in with_tool and _OTHER in with_tool:
        after, rest = with_tool.split(_ASSISTANT, 1)[1].split(_OTHER, 1)
        headers["tool"] = after.removeprefix(end_of_assistant)
        ends.add(rest)
    found = tuple(sorted({end.strip() for end in ends if end.strip()}, key=len, reverse=True))
    # A template that adds a system turn has its end before the first user: a policy writes that end itself.
    for role, header in list(headers.items()):
        end = next((end for end in found if header.strip().startswith(end)), "")
        headers[role] = header.strip().removeprefix(end).lstrip()
    return Marks({role: header for role, header in headers.items() if header}, found)


def turns(segments: Iterable[tuple[bool, str]], marks: Marks) -> list[Turn]:
    """The turns of a sequence. ``segments``: in order, whether the policy wrote the segment, and its decoded text; consecutive ones
    of one writer are joined."""
    found: list[Turn] = []
    for number, (by_policy, parts) in enumerate(groupby(segments, key=itemgetter(0))):
        text = "".join(part for _, part in parts)
        if by_policy:
            found.append(Turn(POLICY, _without_ends(text, marks)))
        else:
            found += read_turns(text, marks, PROMPT if number == 0 else ENVIRONMENT)
    return found


def read_turns(text: str, marks: Marks, default: str) -> list[Turn]:
    """Turns of text that the policy read, without empty ones. The header of the answer at its end is no turn."""
    found: list[Turn] = []
    role, rest = default, text
    while True:
        # The first header, and the longest of those that begin there.
        places = [(rest.find(header), -len(header), role) for role, header in marks.headers.items() if header in rest]
        at, length, follower = min(places, default=(len(rest), 0, ""))
        if told := _without_ends(rest[:at], marks):
            found.append(Turn(role, told))
        if not places:
            return found
        role, rest = follower, rest[at - length :]


def _without_ends(text: str, marks: Marks) -> str:
    text = text.strip()
    while end := next((end for end in marks.ends if text.endswith(end)), ""):
        text = text.removesuffix(end).rstrip()
    while end := next((end for end in marks.ends if text.startswith(end)), ""):
        text = text.removeprefix(end).lstrip()
    return text


def _rendered(tokenizer: Any, dialogue: Sequence[tuple[str, str]]) -> str:
    """Empty without a template, or if the template refuses these messages."""
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        return ""
    messages = [{"role": role, "content": content} for role, content in dialogue]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))
    except (TemplateError, ValueError, KeyError, TypeError):  # as templates do for roles that they do not know
        return ""


def _common_prefix(one: str, other: str) -> str:
    length = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


_MOST_CHARACTERS = 600  # of an expected answer


@dataclass(frozen=True, slots=True)
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
        low = float("-inf") if self.min_reward is None else self.min_reward
        return low <= reward <= (float("inf") if self.max_reward is None else self.max_reward)

    def issue_fits(self, issue: Row) -> bool:
        """``issue``: the record of the task group."""
        evaluation = str(issue.get("evaluation", ""))
        if self.evaluation is not None and self.evaluation not in (evaluation, evaluation.partition("/")[0]):
            return False
        return self.task is None or fnmatch.fnmatchcase(str(issue.get("task_id", "")), self.task)


def read_trajectories(run_dir: Path, wanted: Wanted) -> list[Row]:
    """The newest trajectories of a run that match, oldest first, each with ``issue``, the record of its task group.

    Raises ``ConfigError`` when there is no journal, and for a training step without a recorded batch.
    """
    chosen: list[Row] = []
    with closing(open_journal(run_dir)) as reader:
        groups = _groups_of_step(reader, wanted.step) if wanted.step is not None else None
        issues: dict[str, Row] = {}
        row = None
        for row in reader.last_rows(entries.TRAJECTORY):
            name = row.key.rpartition("/")[0]
            if wanted.group not in (None, name) or (groups is not None and name not in groups):
                continue
            if name not in issues:
                issues[name] = reader.find(entries.GROUP, [name]).get(name, {})
            if not wanted.issue_fits(issues[name]) or (record := reader.load(row)) is None:
                continue
            if wanted.reward_fits(record["reward"]):
                chosen.append({**plain_trajectory(record), "issue": issues[name]})
            if len(chosen) >= wanted.last:
                break
        if row is None:
            raise ConfigError(f"{run_dir} has no trajectories yet: no rollout has ended")
    return chosen[::-1]


def _groups_of_step(reader: JournalReader, step: int) -> set[str]:
    batches = [row for row in reader.rows_of(entries.BATCH) if row.key.rpartition("/")[2] == str(step)]
    if not batches:
        raise ConfigError(f"no batch of training step {step} is recorded: `rollmill trace RUN --list` shows steps")
    read = [reader.load(row) or {} for row in batches]
    return {entry["sequence_id"].split("/")[0] for record in read for entry in record.get("sequences", ())}


def show(run_dir: Path, rows: list[Row], console: Console, *, raw: bool = False) -> None:
    """Print trajectories as conversations; with ``raw``, the text as the policy read and wrote it, special tokens included."""
    recipe = load_resolved(run_dir)
    decoders: dict[str, tuple[Any, Marks]] = {}
    for row in rows:
        for sequence in row["sequences"]:
            policy = sequence["policy"]
            if policy not in decoders:
                decoders[policy] = Ids(), Marks({}, ())
                try:
                    tokenizer = load_tokenizer(policy, recipe.model_path(policy, run_dir))
                    decoders[policy] = tokenizer, Marks({}, ()) if raw else marks_of(tokenizer)
                except ConfigError as error:
                    say(console, error.message, "yellow")
            console.print(_panel(row, sequence, *decoders[policy], raw=raw))


class Ids:
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


def _panel(row: Row, sequence: Row, tokenizer: Any, marks: Marks, *, raw: bool) -> Panel:
    segments = [(s["source"] == TokenSource.POLICY, tokenizer.decode(s["token_ids"])) for s in sequence["segments"]]
    issue = row.get("issue", {})
    styles = {True: "bold green", False: "dim"}
    whole = Text.assemble(*((escaped(text), styles[by_policy]) for by_policy, text in segments))
    parts: list[Any] = [whole if raw else _turns(segments, marks, sequence["policy"])]
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
