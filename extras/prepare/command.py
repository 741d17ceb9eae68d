"""The commands ``rollmill data rstar2`` and ``rollmill data code``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(no_args_is_help=True, help="Prepare datasets.")


@data_app.callback()
def data() -> None:
    """Prepare datasets."""


@data_app.command()
def rstar2(
    inputs: Annotated[list[str], typer.Argument(help="jsonl or parquet files, saved datasets or hub names.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The jsonl file to write.")],
    subset: Annotated[str | None, typer.Option(help="The configuration of hub datasets that have several.")] = None,
) -> None:
    """rStar2's process_train_dataset: math problems in either column layout, as jsonl for `data.train.path`."""
    from extras.prepare.rows import process_train_dataset

    done = process_train_dataset(inputs, output, subset)
    typer.echo(f"{output}: {done.num_rows} rows")
    for name, left_out in done.left_out.items():
        if left_out.count:
            typer.echo(f"{name}: {left_out.count} rows left out: {left_out}")


@data_app.command()
def code(
    inputs: Annotated[list[str], typer.Argument(help="jsonl or parquet files, saved datasets or hub names.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The jsonl file to write.")],
    case_time_s: Annotated[float, typer.Option(help="Seconds of a reference solution on one case.")] = 10.0,
    slots: Annotated[int, typer.Option(help="Solutions that are judged at once.")] = 2,
) -> None:
    """Programming problems in one form, without rows whose tests judge no program or fail their own reference solution."""
    from extras.prepare.rows import prepare_code
    from services.common.config.envgateway import SandboxConfig

    sandbox = SandboxConfig(num_slots=slots, wall_time_s=case_time_s, cpu_time_s=case_time_s)
    done = prepare_code(inputs, output, sandbox, case_time_s)
    typer.echo(f"{output}: {done.num_rows} rows")
    for name in inputs:
        if done.left_out[name].count:
            typer.echo(f"{name}: {done.left_out[name].count} rows left out: {done.left_out[name]}")
        typer.echo(f"{name}: {done.solutions[name]}")
