"""Draws which folder of a service imports which, as SVG, from the import statements of the code.

    python docs/site/imports.py        # writes docs/imports.svg

An arrow points from the importing folder to the imported one. Arrows that follow from others are left out. Files at the
top of a service are two boxes: "app", which builds the parts and starts them, and "top", the rest. Folders that import each
other, directly or through others, are in one row; an arrow with two heads is two imports.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "imports.svg"
SERVICES = ("orchestrator", "inference", "trainer", "envgateway", "cli", "common")
TOP, APP = "top", "app"
APP_FILES = {"__main__", "app"}
WIDTH, ROW, BOX_HEIGHT, GAP, MARGIN = 1120, 74, 40, 14, 24
Graph = Mapping[str, frozenset[str]]


def graph(service: Path) -> dict[str, frozenset[str]]:
    """Folder -> folders of the same service that it imports."""
    found: dict[str, set[str]] = {_folder(path, service): set() for path in _sources(service)}
    for path in _sources(service):
        here = _folder(path, service)
        for module in _imported(path):
            parts = module.split(".")
            if parts[:2] == ["services", service.name] and len(parts) > 2:
                there = parts[2] if (service / parts[2]).is_dir() else _top(parts[2])
                if there != here and there in found:
                    found[here].add(there)
    return {folder: frozenset(targets) for folder, targets in found.items()}


def _sources(service: Path) -> Iterator[Path]:
    return (path for path in sorted(service.rglob("*.py")) if "pb" not in path.parts and path.name != "__init__.py")


def _folder(path: Path, service: Path) -> str:
    parts = path.relative_to(service).parts
    return parts[0] if len(parts) > 1 else _top(path.stem)


def _top(module: str) -> str:
    return APP if module in APP_FILES else TOP


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached(edges: Graph, start: str) -> set[str]:
    """The nodes that paths of one edge or more lead to."""
    found: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += edges[node]
    return found


def rows(edges: Graph) -> list[list[str]]:
    """The nodes by level: each imports nodes of lower rows, or of its own where they import each other."""
    reach = {node: reached(edges, node) for node in edges}
    below = {node: {other for other in reach[node] if node not in reach[other]} for node in edges}
    level: dict[str, int] = {}
    for node in sorted(edges, key=lambda node: len(below[node])):
        level[node] = 1 + max((level[other] for other in below[node]), default=-1)
    # Nodes that import each other have the same nodes below them, so they have the same level.
    levels: dict[int, list[str]] = defaultdict(list)
    for node in sorted(edges):
        levels[level[node]].append(node)
    return [levels[number] for number in sorted(levels, reverse=True)]


def drawn_edges(edges: Graph) -> list[tuple[str, str]]:
    """The edges without those that follow from two others."""
    reach = {node: reached(edges, node) for node in edges}

    def follows(node: str, other: str) -> bool:
        between = (n for n in edges[node] if n != other and node not in reach[n] and other in reach[n])
        return any(other not in reach or n not in reach[other] for n in between)

    return [(node, other) for node in sorted(edges) for other in sorted(edges[node]) if not follows(node, other)]


def panel(service: Path, y: float) -> tuple[list[str], float]:
    """The drawing of one service below ``y``, and where it ends."""
    edges = graph(service)
    places: dict[str, tuple[float, float, float]] = {}  # left, top, width
    shapes = [f'<text x="{MARGIN}" y="{y + 20}" class="title">services/{service.name}</text>']
    for number, row in enumerate(rows(edges)):
        widths = [max(70.0, 7.4 * len(node) + 16) for node in row]
        left = (WIDTH - sum(widths) - GAP * (len(row) - 1)) / 2
        for node, width in zip(row, widths, strict=True):
            places[node] = (left, y + 34 + number * ROW, width)
            left += width + GAP
    for node, other in drawn_edges(edges):
        if node in edges[other] and other < node:
            continue
        heads = ' marker-start="url(#back)"' if node in edges[other] else ""
        shapes.append(f'<path d="{_path(places[node], places[other])}" marker-end="url(#head)"{heads}/>')
    for node, (left, top, width) in places.items():
        shapes.append(f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="5"/>')
        middle = left + width / 2
        shapes.append(f'<text x="{middle:.0f}" y="{top + 25:.0f}" class="box">{escape(node)}</text>')
    return shapes, max(top for _, top, _ in places.values()) + BOX_HEIGHT + MARGIN


def _path(start: tuple[float, float, float], end: tuple[float, float, float]) -> str:
    x1, x2 = start[0] + start[2] / 2, end[0] + end[2] / 2
    if start[1] == end[1]:  # the same row: an arc above
        y = start[1] - 2
        height = 8 + abs(x2 - x1) / 22
        return f"M{x1:.0f},{y:.0f} C{x1:.0f},{y - height:.0f} {x2:.0f},{y - height:.0f} {x2:.0f},{y:.0f}"
    y1, y2 = start[1] + BOX_HEIGHT, end[1] - 3
    return f"M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + 26:.0f} {x2:.0f},{y2 - 26:.0f} {x2:.0f},{y2:.0f}"


def drawing(services: Iterable[Path]) -> str:
    """The whole picture."""
    shapes: list[str] = []
    y = float(MARGIN)
    for service in services:
        more, y = panel(service, y)
        shapes += more
    head = '<path d="M0,0 L8,4 L0,8 z" class="head"/></marker>'
    size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" font-family="sans-serif">',
            "<style>path{fill:none;stroke:#8a94a6;stroke-width:1.2}path.head{fill:#8a94a6;stroke:none}"
            "rect{fill:#eef3fb;stroke:#4a6fa5}text.box{font-size:13px;text-anchor:middle;fill:#1c2733}"
            "text.title{font-size:16px;font-weight:bold;fill:#1c2733}.paper{fill:#fff;stroke:none}</style>",
            f'<defs><marker id="head" {size}>{head}<marker id="back" {size}>{head}</defs>',
            f'<rect class="paper" width="{WIDTH}" height="{y:.0f}"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def main() -> None:
    TARGET.write_text(drawing(ROOT / "services" / name for name in SERVICES), encoding="utf-8")
    sys.stdout.write(f"{TARGET}\n")


if __name__ == "__main__":
    main()
