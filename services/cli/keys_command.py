"""``rollmill keys``: make, renew and look at a run's keys. Imports for making keys stand in the commands that make them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from typer.core import TyperGroup

from services.cli.console import SetOption, console, say
from services.common.errors import ConfigError
from services.common.security.keys import DAYS, WHAT_FOR, Role


class _RunIsDefault(TyperGroup):
    """``rollmill keys RECIPE`` is ``rollmill keys make RECIPE``."""

    def parse_args(self, context: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["make", *args]
        return super().parse_args(context, args)


keys_app = typer.Typer(cls=_RunIsDefault, no_args_is_help=True, rich_markup_mode="markdown")

FolderArgument = Annotated[Path, typer.Argument(help="A directory that `rollmill keys` made.")]


@keys_app.callback()
def keys() -> None:
    """Make the keys of a run. Keys identify the callers of its services, and a role has permission for certain calls.

    With keys, all services of a run use TLS, and each caller has a certificate or a token of this run. Without keys, services
    bind loopback only. `rollmill run` makes keys by itself if the recipe asks for TLS; this command is for processes that are
    started one by one, on one node or several.

    1. `rollmill keys recipes/quickstart -o keys` makes an authority and a directory for every role.

    2. Copy to each node the directories of the roles that run there (`scp -r keys/inference node1:keys/`, where `keys` exists), and no other files:
    `ca.key` and `token.key` create identities: never copy them.

    3. Start each process with `ROLLMILL_KEYS=keys` (or `keys/inference`), commands such as `rollmill watch` likewise: they use
    `keys/operator`, or `keys/viewer`.

    4. Before they expire: `rollmill keys recipes/quickstart -o keys --renew`, and copy again. Running processes load the new keys.

    `rollmill keys show keys` prints role, run and validity. `rollmill keys token keys --role viewer --hours 8` prints one more
    token, for clients that use a token instead of a directory.
    """


@keys_app.command()
def make(
    what: Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or the directory of a run.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address at which clients of others (grpcurl, browsers, agents) reach a service. May be repeated. "
            "Processes of the run need none: they check the role of a peer, not its address."
        ),
    ] = None,
    days: Annotated[float, typer.Option(min=0.01, help="Until certificates and tokens expire.")] = DAYS,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The directory; left out, `keys` in the run's, or keys-RUN here."),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="The run's id; left out, the recipe's run.id, or its name.")
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="New certificates and tokens from the authority that is there.")
    ] = False,
    client_certificates: Annotated[
        bool | None,
        typer.Option(
            help="gRPC callers must show a certificate; left out, as the recipe's security.client_certificates."
        ),
    ] = None,
    set_: SetOption = None,
) -> None:
    """Make the keys of a run (the word `make` may be left out)."""
    from services.cli.keys import Keyring

    run, demanded, folder = _about(what, run_id, set_ or ())
    folder = output or folder
    if renew:
        ring = Keyring(folder)
        if run != ring.run:
            raise ConfigError(f"{folder} holds keys of run {ring.run!r}, not of {run!r}")
        ring.renew(hosts=host or (), days=days)
    else:
        asked = demanded if client_certificates is None else client_certificates
        Keyring.make(folder, run, hosts=host or (), days=days, client_certificates=asked)
    _print(folder)
    say(
        console,
        f"copy the roles of a node there, and start its processes with ROLLMILL_KEYS={folder} (rollmill keys --help)",
    )


@keys_app.command()
def show(folder: FolderArgument) -> None:
    """Print role, run and validity of the keys. Prints no secret."""
    _print(folder)


@keys_app.command()
def token(
    folder: FolderArgument,
    role: Annotated[Role, typer.Option(help="The role of its bearer.")] = Role.VIEWER,
    hours: Annotated[float, typer.Option(min=0.01, help="Until it expires.")] = 8.0,
) -> None:
    """Print one more token. Its bearer has the role, so treat it as a password."""
    from services.cli.keys import Keyring

    sys.stdout.write(Keyring(folder).token(role, hours) + "\n")


def _about(what: Path, run_id: str | None, overrides: Sequence[str]) -> tuple[str, bool, Path]:
    """The run's id, whether certificates are required, and the default folder of its keys.

    Raises:
        ConfigError: no recipe and no run, or overrides of a run, whose settings are fixed.
    """
    from services.cli.keys import KEYS
    from services.common.config.loading import RESOLVED, load_recipe, load_resolved

    if (what / RESOLVED).is_file():
        if overrides:
            raise ConfigError(f"{what} is a run, which has its settings: leave out --set")
        recipe = load_resolved(what)
        return run_id or str(recipe.run.id), recipe.security.client_certificates, what / KEYS
    recipe = load_recipe(what, overrides)
    run = run_id or recipe.run.id or recipe.name
    return run, recipe.security.client_certificates, Path(f"keys-{run}")


def _print(folder: Path) -> None:
    from services.cli.keys import entries
    from services.common.security.keys import moment

    found = entries(folder)
    if not found:
        raise ConfigError(f"there are no keys of a run in {folder}: make them with `rollmill keys RECIPE -o {folder}`")
    for run in sorted({entry.run for entry in found}):
        table = Table("role", "until", "directory", box=None, title=f"keys of run {run}", title_justify="left")
        for entry in found:
            if entry.run == run:
                until = moment(entry.ends_at)
                until = f"[red]{until}: expired[/red]" if entry.ends_at < time.time() else until
                table.add_row(entry.role.value, until, f"{entry.folder}\n  [dim]{WHAT_FOR[entry.role]}[/dim]")
        console.print(table)
