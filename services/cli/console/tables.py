"""Tables for narrow terminals: the least important columns are left out and named, instead of cutting every column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import HEAVY_HEAD, Box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment, SegmentLines
from rich.table import Table
from rich.text import Text

_ANY_WIDTH = 10_000


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a ``FittingTable``."""

    name: str
    justify: Literal["left", "right"] = "left"
    spare: int = 0
    """0: always shown. Columns with the highest number are left out first."""


class FittingTable:
    """Rows of cells, one for each column, drawn with as many columns as the console is wide.

    Texts in cells are markup unless they are ``Text``. Where even the columns that are always shown do not fit, they are folded.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        *,
        title: str = "",
        box: Box | None = HEAVY_HEAD,
        name_left_out: bool = True,
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


_FRAME_LINES, _FRAME_COLUMNS = 2, 4  # of a panel: its border, and one blank at each side
_LEAST_LINES = 3  # of a section that is cut


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a view. ``name`` says what is left out where there is no room."""

    name: str
    content: RenderableType
    may_be_cut: bool = False
    """Whether its first lines are worth showing alone."""


class FittedPanel:
    """Sections in the order of their importance, in a panel of at most ``height`` lines; None is as many as they need."""

    def __init__(self, sections: Sequence[Section], *, title: str, subtitle: str, height: int | None) -> None:
        self._sections = sections
        self._title = title
        self._subtitle = subtitle
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._height is None:
            content: RenderableType = Group(*(section.content for section in self._sections))
        else:
            content = self._fitted(console, options, self._height)
        yield Panel(content, title=Text(self._title), subtitle=self._subtitle)

    def _fitted(self, console: Console, options: ConsoleOptions, height: int) -> RenderableType:
        inside = options.update(width=max(1, options.max_width - _FRAME_COLUMNS), height=None)
        rendered = [console.render_lines(section.content, inside, pad=False) for section in self._sections]
        room = max(1, height - _FRAME_LINES)
        if sum(map(len, rendered)) > room:
            room -= 1  # for the names of what is left out
        shown: list[list[Segment]] = []
        left_out = []
        for section, lines in zip(self._sections, rendered, strict=True):
            free = room - len(shown)
            if len(lines) <= free:
                shown += lines
            elif section.may_be_cut and free >= _LEAST_LINES:
                shown += lines[:free]
                left_out.append(f"the rest of {section.name}")
            else:
                left_out.append(section.name)
        if not left_out:
            return SegmentLines(shown, new_lines=True)
        told = Text(f"no room here for: {', '.join(left_out)}", style="dim", no_wrap=True, overflow="ellipsis")
        return Group(SegmentLines(shown, new_lines=True), told)
