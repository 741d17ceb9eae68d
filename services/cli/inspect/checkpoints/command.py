"""Commands ``rollmill checkpoints`` and ``rollmill export``: list, verify and copy checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from services.cli.console import Column, FittingTable, format_bytes, say
from services.cli.inspect.checkpoints.found import Found, age, find, places, policies_of, total_bytes
from services.common import run_files
from services.common.checkpoints.adapters import ExportForm
from services.common.checkpoints.directory import path_of, read_manifest
from services.common.checkpoints.export import Exported, check_target, export_checkpoint, work_bytes
from services.common.errors import ConfigError, CorruptDataError, InfrastructureError


def tell_checkpoints(run_dir: Path, console: Console, *, verify: bool, as_object: bool) -> bool:
    """List the checkpoints; returns whether all are complete and undamaged."""
    with _progress("verifying", total_bytes(run_dir) if verify else 0) as advance:
        found = list(find(run_dir, verify=verify, progress=advance))
    if as_object:
        console.print_json(json.dumps({"run": str(run_dir), "checkpoints": [each.as_object() for each in found]}))
    elif not found:
        console.print(f"{run_dir} has no checkpoint yet: the first comes at policies.<name>.trainer.checkpoint_every")
    else:
        console.print(_table(found))
        for each in found:
            if each.is_damaged:
                _tell_damage(each, run_dir, console)
        if not verify:
            console.print("only manifests and sizes were looked at; --verify reads every byte", style="dim")
    return not any(each.is_damaged for each in found)


def export_run(
    run_dir: Path,
    policy: str | None,
    step: int | None,
    output: Path | None,
    form: ExportForm = ExportForm.MERGED,
    base: Path | None = None,
) -> Exported:
    """Export a checkpoint of a run, the newest that is whole where none is named.

    Raises:
        ConfigError: there is no such checkpoint, or the target is not an export.
        CorruptDataError: the one that was named is damaged.
        InfrastructureError: the disk refused the write.
    """
    policy = _chosen_policy(run_dir, policy)
    candidates = _candidates(run_dir, policy, step)
    refused = []
    for number, path in candidates:
        ending = "-adapter" if form is ExportForm.ADAPTER else ""
        target = (output or run_files.export(run_dir, f"{policy}-{number:06d}{ending}")).absolute()
        check_target(target)
        try:
            with _progress(f"exporting step {number}", work_bytes(read_manifest(path))) as advance:
                return export_checkpoint(path, target, advance, form=form, base=base)
        except CorruptDataError as error:
            refused.append(error.message)
        except OSError as error:
            raise InfrastructureError(
                f"{target} cannot be written: {error}; make room, or name another place with -o"
            ) from error
    raise CorruptDataError(
        f"no checkpoint of {policy} can be exported: {'; '.join(refused)}; `rollmill checkpoints {run_dir} --verify` looks "
        "at all of them"
    )


def _chosen_policy(run_dir: Path, policy: str | None) -> str:
    there = policies_of(run_dir)
    if not there:
        raise ConfigError(
            f"{run_dir} has no checkpoint yet: the first comes at policies.<name>.trainer.checkpoint_every"
        )
    if policy is None:
        if len(there) > 1:
            raise ConfigError(f"this run has several policies: write --policy with one of {', '.join(there)}")
        return there[0]
    if policy not in there:
        raise ConfigError(f"this run has no checkpoints of a policy {policy!r}; it has those of {', '.join(there)}")
    return policy


def _candidates(run_dir: Path, policy: str, step: int | None) -> list[tuple[int, Path]]:
    """Checkpoints to try, in order; for a named step also one that was set aside, because its weights may be intact."""
    listed = places(run_dir, policy)
    standing = [(number, path) for number, path in listed if path == path_of(path.parent, number)]
    if step is None:
        if not standing:
            aside = ", ".join(str(number) for number, _ in listed)
            hint = f": try --step with one that was set aside as damaged ({aside})" if aside else ""
            raise ConfigError(f"{run_dir} has no checkpoint of {policy}{hint}")
        return standing[::-1]
    chosen = [place for place in listed if place[0] == step]
    if not chosen:
        there = ", ".join(str(number) for number, _ in listed)
        raise ConfigError(f"{run_dir} has no checkpoint of {policy} at step {step}; it has {there or 'none'}")
    return chosen


def _table(found: list[Found]) -> FittingTable:
    columns = [Column("policy"), Column("step", "right"), Column("state"), Column("size", "right"), Column("age", "right"),
               Column("ranks", "right", spare=2), Column("the run can go on from it", spare=1)]  # fmt: skip
    table = FittingTable(columns)
    for each in found:
        manifest = each.manifest
        words = Text(each.state.partition(":")[0], style="red" if each.is_damaged else "green")
        size, old, ranks = (
            (format_bytes(manifest.size_bytes), age(manifest.written_at), str(manifest.num_ranks))
            if manifest
            else ("", "", "")
        )
        table.add_row(
            Text(each.policy), str(each.step), words, size, old, ranks, Text(each.replay.removesuffix(": 0 steps"))
        )
    return table


def _tell_damage(each: Found, run_dir: Path, console: Console) -> None:
    say(console, f"{each.path.name}: {each.set_aside or each.damage}", "red")
    if each.can_be_exported:
        text = f"  its weights: rollmill export {run_dir} --policy {each.policy} --step {each.step}"
        say(console, text)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A line on standard error, if that is a terminal and the work takes time."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not total) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)
