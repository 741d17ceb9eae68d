"""Each pattern of the services takes linear time: a text from outside must not hold an event loop.

Patterns are found in the code, so that a new one is tried, too. Time is CPU time, against a linear pattern on the same machine.
"""

from __future__ import annotations

import ast
import importlib
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LENGTH, SHORT = 32_000, 2_000
BOUND_S = 0.05  # of a text of LENGTH
FUNCTIONS = {"compile", "search", "match", "fullmatch", "findall", "finditer", "sub", "split"}
UNITS = (
    " ", "\n", "\n    ", "\t", "1", "1, ", "1,", "1 ", "-1 ", "1.", "1/", "a", "a ", "aaa ", "a\n", "A", "_", "__a", ".", ",", "()", "(",
    "[", "[,]", "[,", "{", "{}", "\\", "\\text{", "$", "$1$", "*", "=", "-", "<", "<a>", ">", "/", ":", '"', "`", "```\n", "|", "\x1b[0m",
    "\x1b[0", "é", "#", "@", "; ", "a.", "a-", "a:b ",
)  # fmt: skip


def flat(value: Any) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from flat(part)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))


class Known(ast.NodeTransformer):
    """Puts a word in the place of each part of a formatted text that is not known before the call."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        try:
            eval(compile(ast.Expression(ast.JoinedStr([node])), "", "eval"), self.names)
        except Exception:
            return ast.Constant("word")
        return node


def is_searched(text: str, name: str) -> bool:
    """Whether a module looks for a pattern anywhere in a text, and not at its beginning only."""
    uses = re.findall(rf"\b{name}(\.\w+)?", text)[1:]
    return any(use not in (".match", ".fullmatch", ".pattern") for use in uses)


def patterns() -> dict[str, tuple[re.Pattern[Any], bool]]:
    """Patterns of the services, and whether they are searched."""
    found: dict[str, tuple[re.Pattern[Any], bool]] = {}
    for path in sorted((ROOT / "services").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"^import re$", text, re.MULTILINE):
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names = vars(importlib.import_module(name.removesuffix(".__init__")))
        for variable, value in list(names.items()):
            found |= {f"{name}: {one.pattern!r}": (one, is_searched(text, variable)) for one in flat(value)}
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("re.") in FUNCTIONS):
                continue
            if not ast.unparse(node.func).startswith("re.") or not node.args:
                continue
            flags = [word.value for word in node.keywords if word.arg == "flags"]
            flags += [arg for arg in node.args[1:] if ast.unparse(arg).startswith("re.")]
            whole = ast.Expression(ast.List([Known(names).visit(node.args[0]), *flags], ast.Load()))
            try:
                text_of, *with_flags = eval(compile(ast.fix_missing_locations(whole), name, "eval"), names)
            except NameError:
                continue  # a variable: tried by its value in the module, or below
            one = re.compile(text_of, *with_flags)
            function = ast.unparse(node.func).removeprefix("re.")
            found.setdefault(f"{name}: {one.pattern!r}", (one, function not in ("match", "fullmatch")))
    return found


def literals(pattern: str | bytes, flags: int) -> list[str]:
    """The words that a pattern looks for."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    words: list[str] = []

    def walk(parts: Any) -> None:
        word = ""
        for kind, value in [*parts, (None, None)]:
            if str(kind) == "LITERAL":
                word += chr(value)
                continue
            words.extend([word] if word else [])
            word = ""
            if isinstance(value, tuple):
                for inner in value:
                    for part in inner if isinstance(inner, list) else [inner]:
                        if isinstance(part, _parser.SubPattern):
                            walk(part)

    walk(_parser.parse(text, flags & (re.VERBOSE | re.MULTILINE | re.DOTALL | re.IGNORECASE)))
    return sorted(set(words), key=len, reverse=True)[:3]


def texts(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str, str]]:
    words = literals(pattern.pattern, pattern.flags)
    for unit in (*UNITS, *(word + end for word in words for end in ("", " ", "\n", "1", "a"))):
        for begin in ("", *words):
            yield begin, unit, "!"


class TooSlowError(Exception):
    pass


def overdue(*_: object) -> None:
    raise TooSlowError


def used_s(pattern: re.Pattern[Any], text: str, limit_s: float, *, anywhere: bool = True) -> float:
    """CPU seconds of all matches and of a whole match; TooSlowError above the limit."""
    data: Any = text.encode() if isinstance(pattern.pattern, bytes) else text
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    began = time.process_time()
    try:
        for _ in pattern.finditer(data) if anywhere else ():
            pass
        pattern.match(data)
        pattern.fullmatch(data)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return time.process_time() - began


@pytest.fixture(scope="module")
def limit_s() -> Iterator[float]:
    before = signal.signal(signal.SIGVTALRM, overdue)
    linear = min(used_s(re.compile(r"(?:\w++\s++)++"), "a " * (LENGTH // 2), 60) for _ in range(5))
    yield max(BOUND_S, 40 * linear)
    signal.signal(signal.SIGVTALRM, before)


PATTERNS = patterns()


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_a_pattern_takes_linear_time(name: str, limit_s: float) -> None:
    pattern, anywhere = PATTERNS[name]
    for begin, unit, end in texts(pattern):
        try:
            for length in (60, SHORT, LENGTH):
                short_s = used_s(pattern, begin + unit * (length // len(unit)) + end, limit_s, anywhere=anywhere)
                if length == SHORT and short_s < limit_s / 50:
                    break
        except TooSlowError:
            pytest.fail(
                f"{name} takes more than {limit_s:g} s for {begin!r} + {unit!r} * {length // len(unit)} + {end!r}"
            )
