"""Counts files and lines of services, recipes and rollmill without generated code: code, docstrings, comments and blank lines.

``lines`` counts every line of a file, as ``wc -l`` does; the four other counts add up to it. The script also finds the
largest file and the longest function of each part.

    python benchmarks/lines.py [--root FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks._bench import report_facts

ROOT = Path(__file__).resolve().parents[1]
NOT_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineCounts:
    """The lines of one file by kind; a line with code and a comment is a line of code."""

    code: int
    docstring: int
    comment: int
    blank: int

    @property
    def lines(self) -> int:
        return self.code + self.docstring + self.comment + self.blank


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file with its counts and its longest function.

    Example: ``SourceFile(path=Path("services/common/aio.py"), counts=..., longest_function=("first_of", 31))``
    """

    path: Path  # relative to the root
    counts: LineCounts
    longest_function: tuple[str, int]  # its name and its lines; ("", 0) without functions


def counted(source: str) -> LineCounts:
    """The lines of Python source by kind. Raises SyntaxError for other text.

    >>> counted('"A module."\\n\\nx = 1  # one\\n# why\\n')
    LineCounts(code=1, docstring=1, comment=1, blank=1)
    """
    docstring = {line for node in ast.walk(ast.parse(source)) for line in _docstring_lines(node)}
    code, comment = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment.add(token.start[0])
        elif token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstring
    comment -= code
    num_lines = len(source.splitlines())
    blank = num_lines - len(docstring | code | comment)
    return LineCounts(code=len(code), docstring=len(docstring), comment=len(comment), blank=blank)


def _docstring_lines(node: ast.AST) -> Iterator[int]:
    """The lines of docstrings, and of strings below fields, in a module, a class or a function."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        for inner in node.body:
            if (
                isinstance(inner, ast.Expr)
                and isinstance(inner.value, ast.Constant)
                and isinstance(inner.value.value, str)
            ):
                yield from range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)


def longest_function(source: str) -> tuple[str, int]:
    """The name and the number of lines of the longest function, decorators not counted.

    >>> longest_function("def f():\\n    pass\\n")
    ('f', 2)
    """
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = ((node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions)
    return max(lengths, key=lambda named: named[1], default=("", 0))


def source_files(root: Path) -> Iterator[SourceFile]:
    """The files of services, extras, recipes and rollmill, without tests and the modules generated from protos."""
    for path in (
        path for top in ("services", "extras", "recipes", "rollmill") for path in sorted((root / top).rglob("*.py"))
    ):
        relative = path.relative_to(root)
        if not {"pb", "tests"} & set(relative.parts):
            source = path.read_text()
            yield SourceFile(path=relative, counts=counted(source), longest_function=longest_function(source))


def part_of(path: Path) -> str:
    """The service, or the top folder.

    >>> part_of(Path("services/cli/run/launch.py")), part_of(Path("recipes/functions/coins.py"))
    ('services/cli', 'recipes')
    """
    return "/".join(path.parts[:2]) if path.parts[0] == "services" and len(path.parts) > 2 else path.parts[0]


def summary(files: list[SourceFile]) -> dict[str, object]:
    """The sums of a part and its extremes. ``files`` is not empty."""
    largest = max(files, key=lambda file: file.counts.lines)
    longest = max(files, key=lambda file: file.longest_function[1])
    return {
        "files": len(files),
        "lines": sum(file.counts.lines for file in files),
        "code": sum(file.counts.code for file in files),
        "docstring": sum(file.counts.docstring for file in files),
        "comment": sum(file.counts.comment for file in files),
        "blank": sum(file.counts.blank for file in files),
        "largest_file": [str(largest.path), largest.counts.lines],
        "longest_function": [f"{longest.path}:{longest.longest_function[0]}", longest.longest_function[1]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout, to compare with")
    parser.add_argument("--quick", action="store_true", help="no difference: the script takes some seconds")
    files = list(source_files(parser.parse_args().root))
    parts = {name: summary([file for file in files if part_of(file.path) == name]) for name in _names(files)}
    for name, part in parts.items():
        print(f"{part['lines']:6} lines, {part['code']:6} of code, {part['files']:4} files  {name}")
    report_facts("lines", all=summary(files), parts=parts)


def _names(files: list[SourceFile]) -> list[str]:
    return sorted({part_of(file.path) for file in files})


if __name__ == "__main__":
    main()
