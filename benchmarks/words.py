"""Counts indefinite words, such as ``who``, ``what``, ``nobody`` and ``it``, per 100 words of docstrings and of documentation.

These words replace a noun: the reader has to find the noun, and a search for the noun misses the sentence. Words in
backquotes do not count. The script reads docstrings of services, recipes, benchmarks, examples and tests, and the prose of
Markdown pages without code.

    python benchmarks/words.py [--worst 20]
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks._report import report_facts

ROOT = Path(__file__).resolve().parents[1]
CODE = ("services/*", "recipes", "benchmarks", "examples", "rollmill", "tests")
PAGES = ("*.md", "docs/**/*.md", "recipes/**/*.md", "services/**/*.md", "deploy/**/*.md", "examples/**/*.md")
WORDS = frozenset(
    [
        "who",
        "whom",
        "whose",
        "whoever",
        "what",
        "whatever",
        "whichever",
        "nobody",
        "somebody",
        "anybody",
        "everybody",
        "nothing",
        "something",
        "it",
        "stands",
    ]
)
CODE_SPAN = re.compile(r"``[^`]*``|`[^`\n]*`|<!--.*?-->", re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
TARGET = re.compile(r"\]\([^)]*\)")
WORD = re.compile(r"[a-z]+(?:['’][a-z]+)?")


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module, its classes and its functions, and the strings below fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            constants = (node.value for node in node.body if isinstance(node, ast.Expr))
            yield from (c.value for c in constants if isinstance(c, ast.Constant) and isinstance(c.value, str))


def prose(page: str) -> str:
    """A Markdown page without code, tables' bars and targets of links."""
    return TARGET.sub("]", FENCED.sub("", page))


def counted(texts: Iterable[str]) -> tuple[int, Counter[str]]:
    """The number of words, and how often each indefinite word occurs.

    >>> words, found = counted(["A name without quotes counts: it. A name in quotes does not: ``it``."])
    >>> words, dict(found)
    (12, {'it': 1})
    """
    words = [word for text in texts for word in WORD.findall(CODE_SPAN.sub(" ", text).lower())]
    return len(words), Counter(word for word in words if word in WORDS)


def share(words: int, found: Mapping[str, int]) -> float:
    """Indefinite words in 100 words."""
    return 100 * sum(found.values()) / words if words else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--worst", type=int, default=0, metavar="N", help="print the N files with the most of these words"
    )
    parser.add_argument("--quick", action="store_true", help="no difference: the script takes some seconds")
    arguments = parser.parse_args()
    code = {
        str(path.relative_to(ROOT)): counted(docstrings(path.read_text()))
        for pattern in CODE
        for folder in sorted(ROOT.glob(pattern))
        for path in sorted(folder.rglob("*.py"))
        if "pb" not in path.parts  # generated
    }
    docs = {
        str(path.relative_to(ROOT)): counted([prose(path.read_text())])
        for pattern in PAGES
        for path in sorted(ROOT.glob(pattern))
    }
    results = {**code, **docs}
    for name, (words, found) in sorted(results.items(), key=lambda item: -sum(item[1][1].values()))[: arguments.worst]:
        print(f"{sum(found.values()):5} of {words:6} words, {share(words, found):5.2f} in 100  {name}")
    report_facts(
        "words",
        docstrings=_summed(results, {name: _folder(name) for name in code}),
        docs=_summed(results, {name: _pages(name) for name in docs}),
        words=sorted(WORDS),
    )


def _folder(name: str) -> str:
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "services" and len(parts) > 2 else parts[0]


def _pages(name: str) -> str:
    folder = name.rpartition("/")[0]
    return folder if folder in ("docs", "docs/adr") else (folder.split("/")[0] or "top")


def _summed(results: Mapping[str, tuple[int, Counter[str]]], folders: Mapping[str, str]) -> dict[str, object]:
    """The share in 100 words by folder and in all, and the counts by word."""
    words: Counter[str] = Counter()
    found: dict[str, Counter[str]] = {}
    for name, folder in folders.items():
        for key in {folder, folder.partition("/")[0], "all"}:
            words[key] += results[name][0]
            found[key] = found.get(key, Counter()) + results[name][1]
    return {
        "per_100": {folder: share(words[folder], found[folder]) for folder in sorted(found)},
        "num_words": words["all"],
        "by_word": dict(found["all"].most_common()),
    }


if __name__ == "__main__":
    main()
