r"""Rules on an answer's form that Math-Verify lacks: brackets, chains of equations, intervals, digits.

Math-Verify compares values. It takes ``[7,7]`` for 7, ``8=7`` for 7 and ``\{1,2\}`` for ``(1,2)``, and does not read
repeating decimals, ``3.8e27`` or ``1<x<2`` for an interval. Here are the rules on text that correct both ways:
``rewritten`` before the parse, ``other_form`` after an acceptance, ``intervals`` after a rejection. Uses no algebra.
"""

from __future__ import annotations

import enum
import math
import re
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

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
