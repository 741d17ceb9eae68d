"""Fits sections of text into a height: the most important ones whole, the others named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment, SegmentLines
from rich.text import Text

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
