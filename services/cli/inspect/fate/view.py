"""``rollmill fate``: reads the journal, selects steps, and prints tables or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from services.cli.console import Column, FittingTable, say
from services.cli.inspect.fate.facts import Band, Check, Fate, Tally
from services.cli.inspect.fate.reading import Fates, read_fates
from services.common.errors import ConfigError

_UNFINISHED = (Fate.STOPPED, Fate.TIMED_OUT, Fate.FAILED, Fate.CANCELLED)


def show(found: Fates, console: Console, *, policies: Iterable[str], step: int | None, last: int) -> None:
    """Print the fates of a run, or of the task groups issued in one step; the table of steps has the ``last`` ones."""
    for number, policy in enumerate(policies):
        if number:
            console.print()
        total = found.total(policy, step)
        when = "" if step is None else f", issued in step {step}"
        console.print(_fates_table(total, f"{policy}{when}"))
        for reason, count in total.failures.most_common():
            say(console, f"  {count:,} rollouts ended in a failure: {reason}", wrap=True)
        _show_lengths(found, console, policy, step, total)
        if step is None:
            _show_steps(found, console, policy, last)
        if skipped := found.num_updates_skipped[policy]:
            console.print(
                f"{skipped:,} optimizer updates were skipped: the sequences of their minibatches had no effect",
                style="yellow",
            )
    if found.num_passed_over:
        console.print(f"{found.num_passed_over:,} prompts were passed over by data.curation and never issued")
    if found.num_unreadable:
        console.print(f"{found.num_unreadable:,} records of the journal cannot be read", style="bold red")
    _show_checks(found.checks, console)


def _fates_table(total: Tally, title: str) -> FittingTable:
    table = FittingTable(
        [
            *(
                Column(title),
                Column("task groups", "right", 1),
                Column("rollouts", "right"),
                Column("sequences", "right", 2),
            ),
            *(Column("tokens", "right"), Column("of tokens", "right"), Column("mean length", "right", 3)),
        ],
        box=None,
    )
    tokens = total.sampled_tokens
    table.add_row("issued", f"{total.issued_groups:,}", f"{total.issued_rollouts:,}", "", "", "", "")
    for fate in total.fates():
        table.add_row(
            Text(fate.label, style=_style(fate)),
            _count(total.groups[fate]),
            _count(total.rollouts[fate]),
            _count(total.sequences[fate]),
            _count(total.tokens[fate]),
            _percent(total.tokens[fate], tokens) if fate.has_tokens else "",
            f"{total.tokens[fate] / total.sequences[fate]:,.1f}" if total.sequences[fate] else "",
        )
    mean = f"{tokens / total.sampled_sequences:,.1f}" if total.sampled_sequences else ""
    table.add_row("sampled", "", "", f"{total.sampled_sequences:,}", f"{tokens:,}", "", mean)
    return table


def _style(fate: Fate) -> str:
    if fate is Fate.TRAINED:
        return "green"
    return "dim" if fate.in_flight else "yellow"


def _show_lengths(found: Fates, console: Console, policy: str, step: int | None, total: Tally) -> None:
    bands = found.lengths[policy].bands(step)
    if not bands:
        return
    others = [fate for fate in Fate if fate is not Fate.TRAINED and any(band.fates[fate] for band in bands)]
    table = FittingTable(
        [
            *(Column("length"), Column("tokens", "right"), Column("sequences", "right"), Column("trained", "right")),
            *(Column(fate.label, "right", number + 1) for number, fate in enumerate(others)),
        ],
        box=None,
    )
    for band in bands:
        table.add_row(
            band.name,
            f"{band.shortest:,}" if band.shortest == band.longest else f"{band.shortest:,} to {band.longest:,}",
            f"{band.num_sequences:,}",
            f"{band.trained_share:.1%}",
            *(_percent(band.fates[fate], band.num_sequences) for fate in others),
        )
    console.print()
    console.print(table)
    if means := found.lengths[policy].means(step):
        trained, played = means
        say(
            console,
            f"length bias {trained / played:.3f}: mean length trained {trained:,.1f}, played {played:,.1f} tokens",
            wrap=True,
        )
    if unfinished := sum(total.rollouts[fate] for fate in _UNFINISHED):
        say(console, f"{unfinished:,} rollouts were not played to their end and have no length", wrap=True)


def _show_steps(found: Fates, console: Console, policy: str, last: int) -> None:
    steps = found.steps(policy)
    shown = dict(list(steps.items())[-last:])
    fates = [f for f in Fate if f.has_tokens and not f.in_flight and any(t.tokens[f] for t in shown.values())]
    unfinished = [f for f in _UNFINISHED if any(t.rollouts[f] for t in shown.values())]
    table = FittingTable(
        [
            *(Column("issued in step", "right"), Column("rollouts", "right", 1), Column("tokens", "right")),
            *(Column(f.label, "right", 0 if f is Fate.TRAINED else 2) for f in fates),
            *(Column("in flight", "right"), *(Column(f"{f.label} (rollouts)", "right", 3) for f in unfinished)),
        ],
        box=None,
    )
    for step, tally in shown.items():
        tokens = tally.sampled_tokens
        flying = sum(count for fate, count in tally.tokens.items() if fate.in_flight)
        table.add_row(
            str(step),
            f"{tally.issued_rollouts:,}",
            f"{tokens:,}",
            *(_percent(tally.tokens[fate], tokens) for fate in fates),
            _percent(flying, tokens),
            *(_count(tally.rollouts[fate]) for fate in unfinished),
        )
    console.print()
    console.print(table)
    if len(shown) < len(steps):
        console.print(f"the last {len(shown)} of {len(steps)} steps: --last shows more", style="dim")


def _show_checks(checks: list[Check], console: Console) -> None:
    console.print()
    if broken := [check for check in checks if not check.holds]:
        console.print("this does NOT add up:", style="bold red")
        for check in broken:
            say(console, f"  {check.what}: {check.expected:,} against {check.found:,}", "red")
    else:
        say(
            console,
            f"it adds up ({len(checks)} sums): what was issued and sampled is the sum of its fates, and batches hold what "
            "these rollouts brought",
            "dim",
            wrap=True,
        )


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _percent(part: int, whole: int) -> str:
    if not part or not whole:
        return ""
    return f"{part / whole:.1%}" if part / whole >= 0.0005 else "<0.1%"


# --- for machines -----------------------------------------------------------------------------------------------------


def as_json(found: Fates, policies: Iterable[str], step: int | None) -> dict[str, Any]:
    """Every number of the tables. Keys of ``fates`` are those of ``Fate``."""
    chosen = list(policies)
    return {
        "policies": {policy: _policy_json(found, policy, step) for policy in chosen},
        "prompts_passed_over": found.num_passed_over,
        "records_unreadable": found.num_unreadable,
        "adds_up": not found.failed_checks,
        "checks": [
            {"what": check.what, "expected": check.expected, "found": check.found, "holds": check.holds}
            for check in found.checks
        ],
    }


def _policy_json(found: Fates, policy: str, step: int | None) -> dict[str, Any]:
    means = found.lengths[policy].means(step)
    return {
        "total": _tally_json(found.total(policy, step)),
        "steps": [
            {"step": number, **_tally_json(tally)}
            for number, tally in found.steps(policy).items()
            if step is None or number == step
        ],
        "updates_skipped": found.num_updates_skipped[policy],
        "lengths": [_band_json(band) for band in found.lengths[policy].bands(step)],
        "length_bias": means[0] / means[1] if means else None,
        "mean_length_trained": means[0] if means else None,
        "mean_length_played": means[1] if means else None,
    }


def _tally_json(tally: Tally) -> dict[str, Any]:
    return {
        "issued": {"task_groups": tally.issued_groups, "rollouts": tally.issued_rollouts},
        "sampled": {"sequences": tally.sampled_sequences, "tokens": tally.sampled_tokens},
        "fates": {
            fate.value: {
                "task_groups": tally.groups[fate],
                "rollouts": tally.rollouts[fate],
                "sequences": tally.sequences[fate],
                "tokens": tally.tokens[fate],
            }
            for fate in tally.fates()
        },
        "failures": dict(tally.failures),
    }


def _band_json(band: Band) -> dict[str, Any]:
    return {
        "quantiles": band.name,
        "shortest": band.shortest,
        "longest": band.longest,
        "sequences": band.num_sequences,
        "tokens": band.num_tokens,
        "tokens_trained": band.num_trained_tokens,
        "trained_share": band.trained_share,
        "fates": {fate.value: count for fate, count in band.fates.items()},
    }


def tell_fates(
    run_dir: Path, console: Console, *, policy: str | None, step: int | None, last: int, as_object: bool
) -> None:
    """Raises ``ConfigError``: no journal, or a policy or step without issued task groups."""
    found = read_fates(run_dir)
    if policy is not None and policy not in found.policies:
        raise ConfigError(
            f"no task group was issued for a policy {policy!r}; the run has {', '.join(found.policies) or 'none'}"
        )
    policies = found.policies if policy is None else [policy]
    if step is not None:
        policies = [name for name in policies if step in found.steps(name)]
        if not policies:
            known = sorted({number for name in found.policies for number in found.steps(name)})
            told = f"steps {known[0]} to {known[-1]}" if known else "no step at all"
            raise ConfigError(f"no task group was issued in step {step}: this run issued task groups in {told}")
    if as_object:
        typer.echo(json.dumps(as_json(found, policies, step)))
    elif policies:
        show(found, console, policies=policies, step=step, last=last)
    else:
        console.print("no task group was issued for training yet")
