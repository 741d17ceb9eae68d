"""Command ``millrace fate``: reads the journal, selects steps, prints."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console

from services.cli.inspect.fate.reading import read_fates
from services.cli.inspect.fate.view import as_json, show
from services.common.errors import ConfigError


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
