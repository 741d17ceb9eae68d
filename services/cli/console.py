"""What commands print with: sentences, units, tables for narrow terminals, errors, pictures; and the options of several commands."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.box import HEAVY_HEAD, Box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from services.common.errors import ConfigError, RollmillError, UserError
from services.common.telemetry.logs import escaped
from services.common.telemetry.metrics import StepKey, source_key, sources_in

if TYPE_CHECKING:
    from services.common.pb import run_pb2


def say(console: Console, text: str, style: str | None = None, *, wrap: bool = False) -> None:
    """Print one text: brackets in it are no markup, and numbers are not coloured. Without ``wrap``, for commands and paths,
    only the terminal wraps it."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not wrap)


def format_bytes(size: float) -> str:
    """
    >>> format_bytes(1536)
    '1.5 KiB'
    """
    sign, size = ("-" if size < 0 else ""), abs(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.1f} {unit}"
        size /= 1024
    return f"{sign}{size:.1f} TiB"


def format_change(value: float, low: float, high: float, digits: int = 3) -> str:
    """A difference with its interval.

    >>> format_change(0.25, -0.125, 0.625)
    '+0.250 (-0.125..+0.625)'
    """
    return f"{value:+.{digits}f} ({low:+.{digits}f}..{high:+.{digits}f})"


def format_reward(value: float | None, digits: int = 3) -> str:
    """
    >>> format_reward(0.25), format_reward(None)
    ('0.250', '-')
    """
    return "-" if value is None else f"{value:.{digits}f}"


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.0123)
    '12.3 ms'
    """
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def format_span(seconds: float) -> str:
    """A duration in the future, with a precision that fits a forecast.

    >>> format_span(32_400), format_span(1500), format_span(200_000)
    ('9 h', '25 min', '2 d 8 h')
    """
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 120:
        return f"{minutes} min"
    return f"{hours} h" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def format_clock(seconds: float) -> str:
    """A duration as a clock shows it.

    >>> format_clock(65), format_clock(3725), format_clock(200_000)
    ('1:05', '1:02:05', '2 d 7:33')
    """
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


_ANY_WIDTH = 10_000


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a ``FittingTable``."""

    name: str
    justify: Literal["left", "right"] = "left"
    spare: int = 0
    """0: always shown. Columns with the highest number are left out first."""


def columns(text: str) -> list[Column]:
    """Columns that ``|`` divides: ``>`` before a name justifies it right, and a number after ``:`` is ``spare``.

    >>> columns("policy | >loss:2")
    [Column(name='policy', justify='left', spare=0), Column(name='loss', justify='right', spare=2)]
    """
    found = []
    for part in text.split("|"):
        name, _, spare = part.strip().partition(":")
        found.append(Column(name.removeprefix(">"), "right" if name.startswith(">") else "left", int(spare or 0)))
    return found


class FittingTable:
    """Rows of cells, one for each column, drawn with as many columns as the console is wide.

    Texts in cells are markup unless they are ``Text``. Where even the columns that are always shown do not fit, they are folded.
    """

    def __init__(
        self, columns: Sequence[Column], *, title: str = "", box: Box | None = HEAVY_HEAD, name_left_out: bool = True
    ) -> None:
        """``name_left_out``: whether a line below the table names the columns without room."""
        self._name_left_out = name_left_out
        self._columns = tuple(columns)
        self._title = title
        self._box = box
        self._rows: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Raises ``ValueError`` for more or fewer cells than columns."""
        if len(cells) != len(self._columns):
            raise ValueError(f"{len(cells)} cells for {len(self._columns)} columns")
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(range(len(self._columns)))
        left_out: list[str] = []
        while self._width(shown, console, options) > options.max_width:
            spare = max(shown, key=lambda index: (self._columns[index].spare, index))
            if not self._columns[spare].spare:
                break
            shown.remove(spare)
            left_out.insert(0, self._columns[spare].name)
        yield self._table(shown)
        if left_out and self._name_left_out:
            width = self._width(range(len(self._columns)), console, options)
            remedy = f"they need a width of {width}" if console.is_terminal else f"COLUMNS={width} makes room"
            yield Text(f"no room here for: {', '.join(left_out)} ({remedy})", style="dim")

    def _width(self, shown: Sequence[int], console: Console, options: ConsoleOptions) -> int:
        return Measurement.get(console, options.update(max_width=_ANY_WIDTH), self._table(shown)).maximum

    def _table(self, shown: Sequence[int]) -> Table:
        lined = self._box is not None
        table = Table(
            title=self._title or None,
            title_justify="left",
            box=self._box,
            pad_edge=True,
            header_style="table.header" if lined else "dim",
        )
        for index in shown:
            table.add_column(self._columns[index].name, justify=self._columns[index].justify, overflow="fold")
        for row in self._rows:
            table.add_row(*(row[index] for index in shown))
        return table


class Interrupted(Exception):
    """The command was stopped by Ctrl-C or SIGTERM."""


def exit_code(error: RollmillError) -> int:
    """2 for an error that the caller can correct, 1 for any other."""
    return 2 if isinstance(error, UserError) else 1


def tell(error: RollmillError, console: Console) -> None:
    console.print(Text.assemble(("error: ", "bold red"), escaped(error.message)), soft_wrap=True)


class StopSignal:
    """Ctrl-C and SIGTERM. Raises at once, and remembers: an exception inside a C callback is swallowed there.

    While processes are stopped it only remembers: see ``again``.
    """

    def __init__(self) -> None:
        self._received = self._stopping = False
        self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}

    def check(self) -> None:
        """Called once per turn of every loop."""
        if self._received:
            raise KeyboardInterrupt

    def again(self) -> Callable[[], bool]:
        """From now on a signal raises nothing; returns whether one came since."""
        self._received, self._stopping = False, True
        return lambda: self._received

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, *_: object) -> None:
        self._received = True
        if not self._stopping:
            raise KeyboardInterrupt


T = TypeVar("T")


def pyplot() -> Any:
    """matplotlib's ``pyplot``, which needs no screen here. Raises ``ConfigError`` if not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a picture needs the package {error.name}, which is not installed here: pip install matplotlib (the extra "
            "`plot`), or copy the run's directory to where it is and draw there with `rollmill plot`"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def drawn(draw: Callable[[], T], console: Console) -> T | None:
    """The result of ``draw``; or None and the reason if no picture can be made, because no command fails for a missing
    picture."""
    try:
        return draw()
    except ConfigError as error:
        say(console, f"no picture: {error.message}", "yellow")
        return None


_DASH = "-"


def source_table(progress: run_pb2.RunProgress) -> FittingTable:
    """A row for each source of each policy, as of the newest training step."""
    table = FittingTable(
        columns("source | >share | >wanted | >reward | >staleness:1 | >rollouts:2 | >equal groups:3"),
        box=None,
        name_left_out=False,
    )
    for policy in progress.policies:
        for source in sorted(sources_in(policy.metrics)):
            name = source if len(progress.policies) == 1 else f"{policy.policy}/{source}"
            table.add_row(Text(name), *_cells(policy.metrics, source))
    return table


def _cells(metrics: Mapping[str, float], source: str) -> list[str]:
    def value(key: StepKey, form: str) -> str:
        found = metrics.get(source_key(source, key))
        return _DASH if found is None else format(found, form)

    most = value(StepKey.STALENESS_MAX, ".0f")
    return [
        value(StepKey.SHARE, ".1%"),
        value(StepKey.WANTED_SHARE, ".1%"),
        value(StepKey.ROLLOUT_REWARD_MEAN, ".3f"),
        most if most == _DASH else f"≤ {most}",
        value(StepKey.ROLLOUTS_FINISHED, ".0f"),
        value(StepKey.GROUPS_EQUAL_DROPPED, ".0f"),
    ]


def source_words(row: Mapping[str, float]) -> str:
    """The sources of a row of a training step in one line; empty for a run with one dataset. A source without a rollout
    that ended since the batch before has the mean reward of the batch.

    >>> source_words({"source/a/share": 0.25, "source/a/wanted_share": 0.25, "source/a/rollout_reward_mean": 0.5})
    'a 25.0% of the sequences (wanted 25.0%), reward 0.500'
    """
    told = []
    for source in sources_in(row):
        share, wanted, reward, *_ = _cells(row, source)
        batch = row.get(source_key(source, StepKey.BATCH_REWARD_MEAN))
        shown = f"batch reward {batch:.3f}" if reward == _DASH and batch is not None else f"reward {reward}"
        told.append(f"{source} {share} of the sequences (wanted {wanted}), {shown}")
    return "; ".join(told)


console = Console()


def _file_of_name(recipe: Path | None) -> Path | None:
    """The file of a recipe that comes with Rollmill, where it is named and no file or directory has this name."""
    from services.common.config.loading import shipped_recipe  # and the settings: not for `--help`

    return recipe if recipe is None or recipe.exists() else shipped_recipe(str(recipe)) or recipe


RECIPE_HELP = "A recipe.yaml, a directory that holds one, or the name of a recipe of Rollmill, such as `quickstart`."
RecipeArgument = Annotated[Path, typer.Argument(help=RECIPE_HELP, callback=_file_of_name)]
OptionalRecipeArgument = Annotated[Path | None, typer.Argument(help=RECIPE_HELP, callback=_file_of_name)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, e.g. `--set run.steps=20`. May be repeated.")
]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="Transform the recipe as a whole: `tiny` tries it on two CPU cores.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as one JSON object on the last line.")]
