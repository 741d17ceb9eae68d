r"""Rules on an answer's form that Math-Verify lacks: brackets, chains of equations, intervals, digits.

Math-Verify compares values. It takes ``[7,7]`` for 7, ``8=7`` for 7 and ``\{1,2\}`` for ``(1,2)``, and does not read
repeating decimals, ``3.8e27`` or ``1<x<2`` for an interval. Here are the rules on text that correct both ways:
``rewritten`` before the parse, ``other_form`` after an acceptance, ``intervals`` after a rejection. Uses no algebra.
"""

from __future__ import annotations

import enum
import itertools
import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, localcontext
from fractions import Fraction
from typing import Any

from services.common.dataset_rows import BOX, closing_brace, last_boxed
from services.common.text.thoughts import after_thoughts
from services.envgateway.calls import CORRECT, WRONG, RewardResult, truth_of, unparsed

_LARGEST_EXPONENT = 300
_LONGEST = 2000  # characters of an answer that is looked at here
_MOST_INTERVALS = 6
_REPEATING = re.compile(
    r"(?<![\w.\\])(\d*)\.(\d*)(?:\\(?:overline|bar)\s*\{\s*(\d+)\s*\}|\\(?:overline|bar)\s*(\d)(?!\d)"
    r"|\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?|\((\d+)\))"
)
_POWER = re.compile(
    r"(?<![\w.^}\\])(\d+(?:\.\d+)?)(?:\s*(?:\\times|\\cdot|\*|×|·)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?\d+)\s*\}|(\d)(?!\d))"
    r"|[eE]([+-]?\d+))(?![\w.])"
)
_MIXED = re.compile(r"(?<![\w.^}\\/+*-])(-?)(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w./])")
_THIN_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,; ]|~)\d{3})+(?!\d)")
_SPACE_GROUPED = re.compile(r"(?:^|(?<=[{$]))\d{1,3}(?: \d{3})+(?=[}$]|$)")  # only as a whole answer
_ARROW = re.compile(r"\\(?:to|equiv|sim|simeq|rightarrow|Rightarrow|implies|longrightarrow|iff|cong)(?![A-Za-z])")
_AND = re.compile(r"\\(?:text|mathrm|textrm)\{\s*and\s*\}|\\(?:land|wedge)(?![A-Za-z])|(?<![A-Za-z\\])and(?![A-Za-z])")
_BUILDER = re.compile(r"\\\{[A-Za-z](?:\\in(?:\\mathbb\{?R\}?|\\R))?(?:\\mid|\\vert|\||:)(.*)\\\}")
_DEGREE = re.compile(r"\\degree(?![A-Za-z])")
_UNMEANT = re.compile(
    r"\\(?:boldsymbol|bm|bf|mathbf)(?![A-Za-z])\s*(?=\{)|\\(?:checkmark|blacksquare|square|qedhere)(?![A-Za-z])|\\\\(?=\s*+(?:[}$]|\Z))"
)
_ENDING_POINT = re.compile(r"(?<=\d)\.(?=\s*[}$])")
_SPACING = re.compile(r"\\(?:left|right|bigl|bigr|Big|big|displaystyle|,|;|!|:|quad|qquad| )|[$~\s]")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+(?!\d)")
_LABEL = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?(?:\([A-Za-z,]+\))?(?:=|\\in)(?=[\[({\\])")
_RELATION = re.compile(
    r"(?:\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt|ne|neq|neg|lnot|not|lesssim|gtrsim|ll|gg)(?![A-Za-z])"
    r"|[<>≤≥≠¬])=?"
)
_BEGINS = re.compile(rf"^{_RELATION.pattern}|[=,]\s*{_RELATION.pattern}")
_DIVIDES = re.compile(r"\\n?mid(?![A-Za-z])|\d\s*+\|\s*+\d")
_ABOUT = re.compile(r"([+-]?\d++)\s*+\\approx\s*+([+-]?\d++)")
_AND_SO_ON = re.compile(r"\\(?:[lcd]?dots|dots[cbmi])(?![A-Za-z])|\.\.\.|…")
_AT_LEAST = re.compile(
    r"(?<![a-z])(?:or\s+(?:more|less|fewer|greater|higher|lower|larger|smaller)|at\s+(?:least|most)|(?:more|less|fewer|greater)"
    r"\s+than|not)(?![a-z])",
    re.IGNORECASE,
)
_ASIDE = re.compile(r"\d\s++(?:\(\s*+)?(?:[A-Za-z]{2,}+\s++)++\d")  # 18 (not 17), 18 maybe 17
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?:\s*+[ap]\.?m\.?)?+", re.IGNORECASE)
_BASED = re.compile(r"(\d{1,300})(?:_\{?(?:\\text\{)?(\d{1,2})\}{0,2})?")
_ASSIGNED = re.compile(r"([A-Za-z])=(.+)")
_ROMAN = re.compile(
    r"\\(?:mathrm|operatorname|textrm)\*?\s*+\{\s*+(?:([ei])|(ln|lg|log|exp|gcd|det|min|max|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?))\s*+\}"
    r"|\\(?:mathrm|rm)\s++([ei])(?![A-Za-z])"
)
# other spellings of signs that Math-Verify reads
_AS_READ = {
    r"\\log_\s*+(?:\{\s*+e\s*+\}|e(?![A-Za-z]))": r"\\ln ",
    r"\\lg(?![A-Za-z])": r"\\log_{10}",
    r"\\(arc)?tg(?![A-Za-z])": r"\\\1tan",
    r"\\(arc)?ctg(?![A-Za-z])": r"\\\1cot",
    r"\\uppi(?![A-Za-z])": r"\\pi",
    r"\\lbrace(?![A-Za-z])": r"\\{",
    r"\\rbrace(?![A-Za-z])": r"\\}",
    r"\\langle(?![A-Za-z])": "(",
    r"\\rangle(?![A-Za-z])": ")",
    r"\\varnothing(?![A-Za-z])|∅|\\\{\s*+\\\}|\\text\s*+\{\s*+(?:the )?empty set\s*+\}": r"\\emptyset",
    r"\\R(?![A-Za-z])|\\text\s*+\{\s*+(?:all )?real numbers\s*+\}|\(\s*+-\s*+\\infty\s*+,\s*+\+?+\\infty\s*+\)": r"\\mathbb{R}",
    r"(?<=\d),\\!\s*+(?=\d{3})": ",",
    "°": r"^\\circ",
    r"(\\[dtc]?frac)\s*+(\\(?!d?t?frac|sqrt|text|math)[A-Za-z]++|\d(?=\s*+\\))\s*+(?=[\w{\\])": r"\1{\2}",
    r"(\\[dtc]?frac\s*+\{[^{}]*+\})\s*+(\\(?!d?t?frac|sqrt|text|math)[A-Za-z]++)": r"\1{\2}",
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d\}?)?\s*+[({]?\s*+)(\d++(?:\.\d++)?+)\s*+\^\s*+\{?\s*+\\circ\s*+\}?": r"\1{\\frac{\2\\pi}{180}}",
}
_WHOLE_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|mbox)\s*+\{(\s*+[+-]?\d[^{}]*+)\}")
_UNIT = re.compile(
    r"(?<!\s)(?:\s|\\[ ,;])\s*+((?:[A-Za-z]{3,}+|[ckmd][mgsl]|ft|lb|oz|mL|[mg](?=/))(?:\^\{?[23]\}?)?(?:\s*+/\s*+[A-Za-z]++(?:\^\{?[23]\}?)?|\s++[A-Za-z]{3,}+)*+)(?![A-Za-z])"
)
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|mbox|rm)\s*+\{([^{}]*+)\}")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?!\s*+=)")
_NO_UNIT = re.compile(
    r"\b(?:hundred|thousand|[a-z]+illion|dozen|percent|hal[fv]e?s?|thirds?|quarters?|squared|cubed|factorial|or|and|not|more|less|than)\b"
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def rewritten(text: str) -> str:
    r"""The text with repeating decimals as fractions, powers of ten and ``3.8e27`` as digits, ``3 1/2`` as ``7/2``.

    >>> rewritten(r"0.1\overline{6}"), rewritten(r"3.8 \times 10^{3}"), rewritten("1.5e-3"), rewritten("-3 1/2")
    ('\\frac{1}{6}', '3800', '0.0015', '-7/2')
    """
    text = _ROMAN.sub(_italic, text)
    for pattern, sign in _AS_READ.items():
        text = re.sub(pattern, sign, text)
    text = _UNMEANT.sub("", _DEGREE.sub(r"^\\circ", text))
    text = _THIN_GROUPED.sub(lambda match: re.sub(r"\\[,; ]|~", "", match[0]), text)
    text = _SPACE_GROUPED.sub(lambda match: match[0].replace(" ", ""), text)
    text = _ENDING_POINT.sub("", _REPEATING.sub(_as_fraction, text))
    text = _POWER.sub(_as_digits, text)
    return _MIXED.sub(_as_improper, text)


def _italic(match: re.Match[str]) -> str:
    """A constant or a function in the spelling that Math-Verify reads."""
    if match[2]:
        return f"\\{match[2]} "
    before, behind = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return f"{' ' * before.isalpha()}{match[1] or match[3]}{' ' * behind.isalpha()}"


def _as_fraction(match: re.Match[str]) -> str:
    whole, before = match[1] or "0", match[2]
    repeated = match[3] or match[4] or match[8] or (match[5] + (match[6] or "") + (match[7] or ""))
    if len(whole) + len(before) + len(repeated) > _LARGEST_EXPONENT:
        return match[0]
    places = 10 ** len(before)
    value = Fraction(int(whole + before), places) + Fraction(int(repeated), places * (10 ** len(repeated) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator != 1 else str(value.numerator)


def _as_digits(match: re.Match[str]) -> str:
    exponent = int((match[2] or match[3] or match[4])[:6])
    if abs(exponent) > _LARGEST_EXPONENT or len(match[1]) > _LARGEST_EXPONENT:
        return match[0]
    number = format(Decimal(match[1]).scaleb(exponent), "f")
    return number.rstrip("0").rstrip(".") if "." in number else number


def _as_improper(match: re.Match[str]) -> str:
    below = int(match[4][:50])
    return f"{match[1]}{int(match[2][:50]) * below + int(match[3][:50])}/{below}" if below else match[0]


def without_unit(text: str) -> str:
    r"""The number of an answer that plain words of a unit follow; any other answer unchanged.

    >>> without_unit("2.50 dollars"), without_unit("5 km/h"), without_unit("2x apples"), without_unit("7 or more")
    ('2.50', '5', '2x apples', '7 or more')
    """
    whole = _WHOLE_TEXT.fullmatch(text.strip())
    plain = (whole[1] if whole else text).rstrip(" .$")
    units = deque(_UNIT.finditer(plain), maxlen=1)
    if not units or units[0].end() != len(plain) or _NO_UNIT.search(plain, units[0].start()):
        return text
    number = plain[: units[0].start()].strip(" $")
    return number if any(map(str.isdigit, number)) and not _LETTER.search(number) else text


class Form(enum.StrEnum):
    """The form of an answer's contents, by its brackets."""

    ONE = "one value"
    LIST = "values"  # 1, 2
    ORDERED = "a tuple, list or interval"  # (1, 2), [1, 2)
    SET = "a set"  # \\{1, 2\\}


def form_of(text: str) -> Form:
    r"""
    >>> [form_of(text).name for text in (r"\frac{1}{2}", "1,000", "1, 2", "x = [7,7]", r"\{1\}", r"(1,2) \cup (3,4)")]
    ['ONE', 'ONE', 'LIST', 'ORDERED', 'SET', 'ONE']
    """
    text = _plain(text)
    if text.startswith(("\\{", "\\lbrace")):
        return Form.SET
    if any(len(split(_AND.sub(",", text), separator)) > 1 for separator in ",;"):
        return Form.LIST
    closes = _closing_place(text)
    if closes == len(text) - 1 and text[:1] in ("(", "[") and len(split(text[1:-1], ",")) > 1:
        return Form.ORDERED
    return Form.ONE


def alternatives(answer: str) -> list[str]:
    r"""The values among which an answer leaves the choice.

    >>> alternatives(r"17 \vee 18"), alternatives(r"18\text{ (or 17)}"), alternatives(r"18\text{ cm}")
    (['17 ', ' 18'], ['18  ', ' 17) '], ['18\\text{ cm}'])
    """
    found = _UNION.split(re.sub(r"[(,]\s*+(?=or\b)", "", _TEXT.sub(r" \1 ", answer)))
    return found if len(found) > 1 else [answer]


def asks_for_one(truth: str) -> bool:
    """Whether a reference answer is one value."""
    return form_of(truth) is Form.ONE and "," not in truth and "\\pm" not in truth and not _UNION.search(truth)


def other_form(truth: str, answer: str) -> str:
    """Why an answer is no answer though its value is right; empty when its form suits."""
    wanted, given = form_of(truth), form_of(answer)
    is_one = wanted is Form.ONE and "\\pm" not in truth
    if is_one and _ASIDE.search(_worded(answer)) and not _ASIDE.search(_worded(truth)):
        return "another value beside the answer"
    if is_one and given in (Form.LIST, Form.ORDERED) and intervals(truth) is None:
        return f"{given} where one value is asked for"
    if {wanted, given} == {Form.SET, Form.ORDERED}:
        return f"{given} where {wanted} is asked for"
    if wanted is Form.SET and "\\{" in answer and len(split(_plain(answer), ",")) > 1:
        return "sets where one is asked for"
    for rule, what in (
        (_AND_SO_ON, "more than is written"),
        (_AT_LEAST, "a bound"),
        (_BEGINS, "a relation"),
        (_DIVIDES, "a relation"),
    ):
        if rule.search(_worded(answer)) and not rule.search(_worded(truth)):
            return f"{what} where {wanted} is asked for"
    if (
        (clock := _CLOCK.fullmatch(_worded(truth)))
        and [int(part) for part in re.findall(r"\d{1,9}", answer)] != (time := [int(clock[1]), int(clock[2])])
        and (clock[2][0] == "0" or math.gcd(*time) > 1)
    ):  # 12:30 is no ratio
        return "a number where a time is asked for"
    about = _ABOUT.fullmatch(_worded(answer))
    if about and about[1] != about[2]:
        return "an equation that does not hold"
    if _bases_differ(truth, answer):
        return "a number in another base"
    return "values of names in another order" if wanted is Form.ORDERED and _disordered(answer) else ""


def _bases_differ(truth: str, answer: str) -> bool:
    """Whether an answer names a base in which its digits are another number. A base that is not named is the asked one."""
    asked, named = _BASED.fullmatch(_plain(truth)), _BASED.fullmatch(_plain(answer))
    if named is None or named[2] is None:
        return False
    if asked is not None and asked[2] is not None:
        return asked[2] != named[2]
    base = int(named[2])
    try:
        return asked is not None and int(named[1], base) != int(named[1])
    except ValueError:  # no digits of this base
        return True


def named_values(text: str) -> list[tuple[str, str]]:
    """Names and values of x=1, y=2 in the order of the names; empty for other texts.

    >>> named_values("y=2, x=1"), named_values("1, 2")
    ([('x', '1'), ('y', '2')], [])
    """
    parts = split(_AND.sub(",", _SPACING.sub("", text[:_LONGEST])), ",")
    found = [match for part in parts if (match := _ASSIGNED.fullmatch(part))]
    names = {match[1] for match in found}
    return sorted((match[1], match[2]) for match in found) if len(names) == len(parts) > 1 else []


def listed_values(text: str) -> list[str]:
    """The values of 1, 2 or (1, 2); by name, where the list has names."""
    named = named_values(text)
    if named:
        return [value for _, value in named]
    text = _plain(text)
    if form_of(text) is Form.ORDERED:
        text = text[1:-1]
    return split(_AND.sub(",", text), ",")


_CHOICE = re.compile(r"(?:\(([A-Z])\)|([A-Z])[.:)])(?:(?!\b[A-Z]\b).)*+")
_LONGEST_PRODUCT = 3  # letters, of which case makes others


def same_words(truth: str, answer: str) -> bool:
    """Whether they are the same words in capitals or not, or the answer is the asked choice with its contents.

    >>> same_words("true", r"\\text{True}"), same_words("B", "(B) 12"), same_words("B", "(B) or (C)"), same_words("AB", "ab")
    (True, True, False, False)
    """
    wanted, given = _worded(truth), _worded(answer)
    if chosen := _CHOICE.fullmatch(given):
        return wanted.strip("()") == (chosen[1] or chosen[2])
    are_words = all(each.replace(" ", "").isalpha() for each in (wanted, given))
    return (
        are_words
        and wanted.casefold() == given.casefold()
        and ("\\text" in truth + answer or len(wanted) > _LONGEST_PRODUCT)
    )


def _worded(text: str) -> str:
    """The text without its wrapping: dollars, sizes, the command of a text."""
    return re.sub(
        r"\\(?:text|mathrm|textrm|mbox|textbf)\s*\{|[${}~]|\\[,;!: ]|\\(?:left|right)(?![a-z])", " ", text[:_LONGEST]
    ).strip()


def _disordered(answer: str) -> bool:
    """y=3, x=4: by their names these are (4, 3)."""
    named = named_values(answer)
    return bool(named) and not _plain(answer).startswith(named[0][0])


def equations(text: str) -> list[list[str]]:
    """The sides of every equation of an answer, in order.

    >>> equations("x=4=5"), equations("x=1, y=2"), equations("7"), equations(r"x \\le 7")
    ([['x', '4', '5']], [['x', '1'], ['y', '2']], [], [])
    """
    text = text[:_LONGEST].strip().strip("$").rstrip(".")
    found = []
    if "\\pmod" in text or "\\bmod" in text:
        return []
    for part in split(_ARROW.sub("=", text), ","):
        if re.search(r"[<>]|\\(?:le|ge|leq|geq|leqslant|geqslant|ne|neq|lt|gt|approx)(?![a-z])", part):
            continue
        sides = [side.strip() for side in split(part, "=")]
        if len(sides) > 1 and all(sides):
            found.append(sides)
    return found


@dataclass(frozen=True, slots=True)
class Span:
    """An interval by its text; no bound is infinity."""

    low: str
    high: str
    has_low: bool
    has_high: bool


_SIGN = re.compile(r"(\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt)(?![A-Za-z])|<=|>=|≤|≥|<|>)")
_IS_LESS = {"\\leqslant": "<=", "\\leq": "<=", "\\le": "<=", "<=": "<=", "≤": "<=", "\\lt": "<", "<": "<"}
_IS_MORE = {"\\geqslant": "<=", "\\geq": "<=", "\\ge": "<=", ">=": "<=", "≥": "<=", "\\gt": "<", ">": "<"}
_PLAIN_SIGNS = {sign: plain for sign, plain in _IS_LESS.items() if sign[0] == "\\"} | {
    sign: plain.replace("<", ">") for sign, plain in _IS_MORE.items() if sign[0] == "\\"
}
_NAME = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?")
_UNION = re.compile(r"\\cup|∪|\\text\{or\}|\\mathrm\{or\}|\\lor|\\vee|(?<![a-z])or(?![a-z])")
_INFINITE = re.compile(r"\+?(?:\\infty|∞|\\infin|oo|inf|infinity)")


def intervals(text: str) -> tuple[list[Span], bool] | None:
    r"""An answer as intervals, and whether inequalities express them; None for other answers.

    >>> intervals(r"1 < x \le 2")
    ([Span(low='1', high='2', has_low=False, has_high=True)], True)
    """
    text = _plain(_SIGN.sub(lambda sign: _PLAIN_SIGNS.get(sign[0], sign[0]), text[:_LONGEST]))
    if builder := _BUILDER.fullmatch(text):
        text = builder[1]
    parts = _UNION.split(text)
    spans, by_inequalities = [], False
    for part in parts[:_MOST_INTERVALS]:
        span = _bracketed(part)
        if span is None:
            span, by_inequalities = _inequality(part), True
        if span is None:
            return None
        spans.append(span)
    return (spans, by_inequalities) if len(parts) <= _MOST_INTERVALS else None


def _bracketed(text: str) -> Span | None:
    text = text[label.end() :] if (label := _LABEL.match(text)) else text
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return None
    bounds = split(text[1:-1], ",")
    return _span(bounds[0], bounds[1], text[0] == "[", text[-1] == "]") if len(bounds) == 2 else None


def _inequality(text: str) -> Span | None:
    both = _AND.split(text)
    if len(both) == 2:
        low, high = sorted((_inequality(part) for part in both), key=lambda span: span is None or not span.low)
        is_pair = low is not None and high is not None and not low.high and not high.low
        return Span(low.low, high.high, low.has_low, high.has_high) if low and high and is_pair else None
    parts = _SIGN.split(text)
    sides, signs = parts[::2], parts[1::2]
    if not signs or len(signs) > 2 or not all(sides):
        return None
    if all(sign in _IS_MORE for sign in signs):
        sides, signs = sides[::-1], signs[::-1]
        signs = [_IS_MORE[sign] for sign in signs]
    elif all(sign in _IS_LESS for sign in signs):
        signs = [_IS_LESS[sign] for sign in signs]
    else:
        return None
    if len(signs) == 2:
        return _span(sides[0], sides[2], signs[0] == "<=", signs[1] == "<=") if _NAME.fullmatch(sides[1]) else None
    if _NAME.fullmatch(sides[0]):
        return _span("-\\infty", sides[1], False, signs[0] == "<=")
    return _span(sides[0], "\\infty", signs[0] == "<=", False) if _NAME.fullmatch(sides[1]) else None


def _span(low: str, high: str, has_low: bool, has_high: bool) -> Span | None:
    no_low = low[:1] == "-" and _INFINITE.fullmatch(low[1:]) is not None
    no_high = _INFINITE.fullmatch(high) is not None
    if (no_low and has_low) or (no_high and has_high):
        return None
    return Span("" if no_low else low, "" if no_high else high, has_low, has_high)


def split(text: str, separator: str) -> list[str]:
    """The parts between separators that stand in no bracket.

    >>> split("f(1,2), [3,4]", ",")
    ['f(1,2)', ' [3,4]']
    """
    parts, depth, begin = [], 0, 0
    for place, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth = max(0, depth - 1)
        elif character == separator and depth == 0 and text[place - 1 : place] not in ("!", ":", "\\"):
            parts.append(text[begin:place])
            begin = place + 1
    return [*parts, text[begin:]]


def _plain(text: str) -> str:
    """The text without spaces, dollars, sizes of brackets, grouping of digits, a label and a full stop."""
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text[:_LONGEST])
    text = _SPACING.sub("", text).rstrip(".")
    return text[label.end() :] if (label := _LABEL.match(text)) else text


def _closing_place(text: str) -> int:
    """Position where any closing bracket closes the first bracket; -1 when there is no closing bracket."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in _CLOSING) - (character in ")]}")
        if depth == 0:
            return place if place else -1
    return -1


# --- Answers in a box: reads ``\boxed{...}`` and compares the answer with the truth, without any algebra.


_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")  # int() refuses more digits than 4300


_JOINING = re.compile(r"[\s$,;&]*+(?:and|or)?+[\s$,;]*+(?:[A-Za-z]\s*+=)?+[\s$]*+")


def final_answers(text: str) -> list[str]:
    r"""The content of the last box, and of those before it with no more than a comma, "and" or "or" between.
    Empty where the last box is empty or not closed.

    >>> final_answers(r"\boxed{4}. No, it is \boxed{5}"), final_answers(r"\boxed{4} or $x=\boxed{5}$"), final_answers("5")
    (['5'], ['4', '5'], [])
    """
    contents: list[str] = []
    begun = len(text)  # of the box behind
    for box in reversed(list(BOX.finditer(text))):
        end = closing_brace(text, box.end())
        if contents and (end is None or not _JOINING.fullmatch(text, end + 1, begun)):
            break
        if end is None or not (content := text[box.end() : end].strip()):
            return []
        contents.insert(0, content)
        begun = box.start()
        if len(contents) > _MOST_BOXES:
            break
    return list(dict.fromkeys(contents))


def as_integer(text: str) -> int | None:
    """A plain integer; None for other texts, including those that only look like integers.

    >>> as_integer("-12"), as_integer("007"), as_integer("1,000"), as_integer("²")
    (-12, 7, None, None)
    """
    return int(text) if _INTEGER.fullmatch(text) else None


_NUMBER = r"\d++(?:[./]\d++)?+"
_BETWEEN = r"(?:(?:\s*+(?:[,;|]|\.{3}|…|\\[lc]?dots\b|\\mid\b|\band\b|\bor\b))++\s*+[+-]?|\s++(?!\d++/))"
_NUMBERS = re.compile(rf"(?<![\w.^])[+-]?{_NUMBER}((?:{_BETWEEN}{_NUMBER})++)?+")
_CLOSING_TEXT = re.compile(r"(?:\([^()\d]*+\)|[\s.,;:?!…()\[\]{}\\*]|\band so on\b|\betc\b)*+")
_GROUPED_DIGITS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[+-]?\d{1,3}(?:\s+\d{3})+")
_LIST = re.compile(r"[\[{]([^\[\]{}]*+)[\]}]\W*+")
_WRAPPED = re.compile(r"\\text\s*+\{\s*+(and|or)\s*+\}|\\[,;:! ]|[$~]")
_MOST_CHARS = 1000  # of the end of a line
_MOST_BOXES = 100


def ends_in_bare_list(text: str) -> bool:
    """Whether an unboxed text ends in several numbers: a list of candidates is not an answer.

    >>> ends_in_bare_list("[1, 2, 10000]"), ends_in_bare_list("one of 1, 2 or 3."), ends_in_bare_list("so it is 10,000")
    (True, True, False)
    """
    lines = text.strip().splitlines()
    if not lines:
        return False
    last = _WRAPPED.sub(r" \1 ", lines[-1][-_MOST_CHARS:]).strip()
    numbers = deque(_NUMBERS.finditer(last), maxlen=1)
    if numbers and numbers[0][1] and _CLOSING_TEXT.fullmatch(last, numbers[0].end()):
        return not _GROUPED_DIGITS.fullmatch(numbers[0][0])
    listed = deque(_LIST.finditer(last), maxlen=1)
    return bool(listed) and listed[0].end() == len(last) and "," in listed[0][1]


def compare_plainly(answer: str, truth: str) -> RewardResult | None:
    """A verdict without algebra: equal texts, or two plain integers. None where the comparison needs algebra."""
    if answer == truth:
        return CORRECT
    left, right = as_integer(answer), as_integer(truth)
    if left is None or right is None:
        return None
    return CORRECT if left == right else WRONG


def boxed_match(task: Mapping[str, Any], completion: str) -> RewardResult:
    r"""1 for a well-formed ``\boxed{...}`` equal to the truth (as text, or as an integer); the last box after the thought counts."""
    truth = truth_of(task)
    answer = last_boxed(after_thoughts(completion))
    if not answer:
        return unparsed("no closed, non-empty box")
    return compare_plainly(answer, truth) or WRONG


# --- Compares an answer with the reference answer: Math-Verify, with checks before and after.


_MOST_SPANS = 4
_Parsed = list[Any]


class MathComparison:
    """``gold`` and ``answer`` parse; ``wrong`` compares. Untrusted formulas may raise any error."""

    def __init__(self) -> None:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        self._parse, self._verify = parse, verify
        self._settings = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]  # boxed answers first

    def gold(self, truth: str) -> _Parsed:
        """The parsed reference answer; empty when the comparison is impossible."""
        truth = rewritten(truth)
        found = self._parsed(truth) if "$" in truth or "\\boxed" in truth else []
        return found or self._parsed(f"${truth}$")

    def answer(self, completion: str) -> _Parsed:
        """Empty when no answer is found."""
        return self._parsed(rewritten(completion))

    def is_equal(self, gold: _Parsed, answer: _Parsed) -> bool:
        """Whether Math-Verify alone finds them equal."""
        return bool(self._verify(gold, answer, timeout_seconds=None, raise_on_error=True))

    def wrong(self, truth: str, gold: _Parsed, completion: str, answer: _Parsed) -> str | None:
        """Why the answer is wrong; empty when the answer is another value, None when the answer is right."""
        wanted, given = _text(gold, truth), _text(answer, completion)
        if wanted == given:
            return None
        if self.is_equal(gold, answer):
            if is_merely_near(gold, answer):
                return "near, and not equal"
            return (
                other_form(rewritten(wanted), rewritten(given))
                or self._broken_chain(given)
                or self._exchanged(wanted, given)
                or None
            )
        if self._same_percent(wanted, given) or same_words(wanted, given):
            return None
        if self._same_intervals(wanted, given) or self._same_turned(gold, given) or self._same_complex(gold, answer):
            return None
        return ""

    def _parsed(self, text: str) -> _Parsed:
        return list(self._parse(text, self._settings, parsing_timeout=None))

    def _same(self, left: str, right: str) -> bool:
        if left == right:
            return True
        first, second = self._parsed(f"${left}$"), self._parsed(f"${right}$")
        return bool(first and second) and self.is_equal(first, second) and not is_merely_near(first, second)

    def _broken_chain(self, given: str) -> str:
        """A number of an equation that differs from the equation's last number, as in 8=7."""
        for *sides, last in equations(given):
            end = self._parsed(f"${last}$")
            for side in sides:
                found = self._parsed(f"${side}$")
                if found and _is_number(found[0]) and end and _is_number(end[0]) and not self.is_equal(end, found):
                    return "an equation that does not hold"
        return ""

    def _exchanged(self, wanted: str, given: str) -> str:
        """2, 1 for x=1, y=2, as Math-Verify takes both for sets."""
        if not named_values(wanted):
            return ""
        left, right = listed_values(wanted), listed_values(given)
        if len(left) != len(right) or all(self._same(a, b) for a, b in zip(left, right, strict=True)):
            return ""
        return "values of names in another order"

    def _same_turned(self, gold: _Parsed, given: str) -> bool:
        """7=x for 7, or for x=7."""
        found = equations(given)
        if len(found) != 1 or len(found[0]) != 2 or not found[0][1].isalpha() or len(found[0][1]) > 1:
            return False
        side, name = found[0]
        return self.is_equal(gold, self._parsed(f"${name}={side}$"))

    def _same_percent(self, wanted: str, given: str) -> bool:
        """Whether the numbers are the same, with a percent sign on one side only."""
        left, right = (text.strip().rstrip(".").rstrip() for text in (wanted, given))
        if left.endswith("%") is right.endswith("%"):
            return False
        return self._same(*(text.removesuffix("%").removesuffix("\\") for text in (left, right)))

    def _same_complex(self, gold: _Parsed, answer: _Parsed) -> bool:
        """Whether they are equal with ``i`` for the root of -1, where each side has another form."""
        import sympy

        if not (_has_i(gold[0]) or _has_i(answer[0])):
            return False
        pair = []
        for found in (gold, answer):
            value = found[0]
            named = {symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"} if hasattr(value, "free_symbols") else {}  # fmt: skip
            value = value.subs(named) if named else value
            pair.append(value.doit() if hasattr(value, "doit") else value)
        if any(getattr(value, "free_symbols", None) for value in pair):
            return False
        return self.is_equal([pair[0]], [pair[1]])

    def _same_intervals(self, wanted: str, given: str) -> bool:
        """Intervals, where one side writes them as inequalities."""
        left, right = intervals(wanted), intervals(given)
        if left is None or right is None or not (left[1] or right[1]) or len(left[0]) != len(right[0]):
            return False
        if len(left[0]) > _MOST_SPANS:
            return False
        return any(
            all(self._same_span(a, b) for a, b in zip(left[0], order, strict=True))
            for order in itertools.permutations(right[0])
        )

    def _same_span(self, a: Span, b: Span) -> bool:
        if (a.has_low, a.has_high, not a.low, not a.high) != (b.has_low, b.has_high, not b.low, not b.high):
            return False
        return self._same(a.low, b.low) and self._same(a.high, b.high)


def _text(parsed: _Parsed, source: str) -> str:
    """The text that was read as the answer."""
    return last_boxed(source) or next((part for part in parsed if isinstance(part, str)), source)


def _is_number(value: Any) -> bool:
    return bool(getattr(value, "is_number", False))


def _has_i(value: Any) -> bool:
    return any(symbol.name == "i" for symbol in getattr(value, "free_symbols", ()))


_LEAST_DIGITS = 6
_DIGITS = 60  # of the evaluation of values other than decimals
_SAME = 1e-40  # of two such values, relatively


def is_merely_near(gold: Any, answer: Any) -> bool:
    """Whether two parsed answers (lists as Math-Verify's ``parse`` gives them) are unequal numbers.

    Math-Verify compares decimals after rounding both to six places, so that 0.0000002 passes for 0.0000001. Here a
    decimal counts for a number only if both are equal; or, for a number without an exact decimal (1/3, a root, pi), if
    the decimal is the number rounded at the decimal's last place and shows at least six significant digits.

    Other numbers are compared exactly if both are rational, else by their first digits. Sets, tuples, intervals and
    matrices are compared part by part. False for other values: percentages, symbols.
    """
    if not gold or not answer or any("%" in str(part) for part in (*gold[1:], *answer[1:])):
        return False
    return _are_apart(gold[0], answer[0])


def _are_apart(first: Any, second: Any) -> bool:
    import sympy

    if all(
        isinstance(value, (sympy.FiniteSet, sympy.Tuple, sympy.Interval, sympy.MatrixBase)) for value in (first, second)
    ):
        ours, theirs = (value if isinstance(value, sympy.MatrixBase) else value.args for value in (first, second))
        if isinstance(first, sympy.FiniteSet) or isinstance(second, sympy.FiniteSet):
            return any(all(_are_apart(one, other) for other in theirs) for one in ours)
        return any(map(_are_apart, ours, theirs))
    left, right = _number(first), _number(second)
    if left is None or right is None:
        return False
    if isinstance(left, Decimal) and isinstance(right, Decimal):
        return left != right
    if isinstance(right, Decimal):
        left, right = right, left
    if isinstance(left, Decimal):
        return not _is_rounded(left, right)
    left, right = left.doit(), right.doit()
    if left.is_Rational and right.is_Rational:
        return bool(left != right)
    largest = max(abs(number.evalf(_DIGITS)) for number in (left, right))
    return bool(abs((left - right).evalf(_DIGITS)) > largest * _SAME)


def _number(value: Any) -> Any:
    """A ``Decimal`` for a decimal, the sympy number for another real number, None for other values."""
    if getattr(value, "rhs", None) is not None and getattr(value, "lhs", None) is not None:
        value = value.rhs  # x = 0.5
    if getattr(value, "is_Float", False):
        try:
            return Decimal(str(value))
        except InvalidOperation:
            return None
    is_number = bool(getattr(value, "is_number", False)) and getattr(value, "is_real", False) is True
    return value if is_number else None


def _is_rounded(decimal: Decimal, number: Any) -> bool:
    """Whether the decimal is the number, or the number rounded at the decimal's last place."""
    with localcontext() as context:
        context.prec = 2 * _DIGITS
        if getattr(number, "is_Rational", False):
            exact = Decimal(int(number.p)) / Decimal(int(number.q))
        else:
            exact = Decimal(str(number.evalf(_DIGITS)))
        if exact == decimal:
            return True
        shown = decimal.normalize()
        if len(shown.as_tuple().digits) < _LEAST_DIGITS:
            return False
        exponent = shown.as_tuple().exponent
        assert isinstance(exponent, int)  # finite, because read from digits
        return abs(exact - decimal) <= Decimal(1).scaleb(exponent) / 2
