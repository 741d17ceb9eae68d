"""Answers with programs, and whether the reference's grader of code (AstraFlow `343e808`) passes them.

``there`` was recorded from that grader; ``here`` is the verdict of this project where the two differ on purpose, with the
row of the recipe page that tells it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Program:
    """One answer and the tests of its row."""

    name: str
    answer: str
    inputs: list[Any]
    outputs: list[Any]
    fn_name: str | None = None
    there: bool = True
    here: bool | None = None  # None: as there
    row: str = ""  # "behaviour" of the recipe page that tells of the difference


def _fenced(code: str) -> str:
    return f"Here it is:\n\n```python\n{code}\n```\n"


def _prints(
    name: str, text: str, expected: str, there: bool = True, here: bool | None = None, row: str = ""
) -> Program:
    """A program that prints a text."""
    code = f"text = {text!r}\nprint(text, end='')"
    return Program(name, _fenced(code), [""], [expected], there=there, here=here, row=row)


def _reads(
    name: str, code: str, given: str, expected: str, there: bool = True, here: bool | None = None, row: str = ""
) -> Program:
    """A program over stdin."""
    return Program(name, _fenced(code), [given], [expected], there=there, here=here, row=row)


def _returns(
    name: str, code: str, args: Any, output: Any, there: bool = True, here: bool | None = None, row: str = ""
) -> Program:
    """A function ``f``."""
    return Program(name, _fenced(code), [args], [output], "f", there, here, row)


_ADD = "print(sum(map(int, input().split())))"
_NUMBERS, _VALUES, _BLOCKS = "printed integers", "an expected value of a call", "the program in an answer"
PROGRAMS = [
    # printed forms
    _prints("a shorter decimal", "0.333333", "0.3333333333"),
    _prints("a longer decimal", "0.3333333333333333", "0.333333"),
    _prints("zeros at the end of the expected", "2.5", "2.50000"),
    _prints("zeros at the end of the printed", "2.50", "2.5"),
    _prints("an integer for a decimal", "112", "112.00000000"),
    _prints("a decimal for an integer", "3.0", "3"),
    _prints("an exponent", "1e-05", "0.00001"),
    _prints("a capital exponent", "1E5", "100000"),
    _prints("nearly the integer", "0.9999999999", "1"),
    _prints("a distant decimal", "0.334", "0.333", there=False),
    _prints("another decimal than the integer", "3.1", "3", there=False),
    _prints("several decimals, a line each", "0.5\n1.250\n3\n", "0.50\n1.25\n3"),
    _prints("one wrong decimal of several", "0.5\n1.26\n", "0.50\n1.25", there=False),
    _prints("near integers", "100000001", "100000000", there=False),
    _prints("near negative integers", "-100000001", "-100000000", here=False, row=_NUMBERS),
    _prints("a near integer as a decimal", "100000001.0", "100000000", here=False, row=_NUMBERS),
    _prints("decimals beside each other", "0.5 1.5", "0.50 1.50", there=False, here=True, row=_NUMBERS),
    _prints("a decimal beside a word", "Case 1: 0.5", "Case 1: 0.50", there=False, here=True, row=_NUMBERS),
    _prints("infinity", "inf", "Infinity"),
    _prints("leading zeros", "0011", "11", there=False),
    _prints("a plus", "+5", "5"),
    # blanks
    _prints("blanks at the ends", "  1 \n 2\t\n\n", "1\n2"),
    _prints("blank lines at both ends", "\n\n1\n2\n\n\n", "1\n2\n"),
    _prints("a blank line between", "1\n\n2", "1\n2"),
    _prints("a blank line in the expected", "1\n2", "1\n\n2"),
    _prints("carriage returns", "1\r\n2\r\n", "1\n2"),
    _prints("two blanks between words", "a  b", "a b", there=False),
    _prints("a missing line", "1", "1\n2", there=False),
    _prints("another case of letters", "yes", "YES", there=False),
    _prints("another order of lines", "2\n1", "1\n2", there=False),
    # names and depth
    _reads("typing without an import", "def f(a: List[int]) -> Optional[int]:\n    return sum(a)\nprint(f([1, 2]))", "", "3"),
    _reads("functions without an import", "print(gcd(4, 6), sqrt(4), len(Counter('aab')), list(permutations([1])))", "", "2 2.0 2 [(1,)]"),
    _reads("modules without an import", "print(math.floor(2.5), sys.maxsize > 0, re.sub('a', 'b', 'aa'), json.dumps([1]))", "", '2 True bb [1]'),
    _reads("collections without an import", "d = defaultdict(list)\nd[1].append(2)\nh = [3, 1]\nheapify(h)\nprint(dict(d), heappop(h), deque([1])[0])", "", "{1: [2]} 1 1"),
    _reads("the built-in pow stays", "print(pow(2, 10, 1000), abs(-3), sum([1]), max(2, 3))", "", "24 3 1 3"),
    _reads("a name that nothing defines", "print(solve_it(3))", "", "3", there=False),
    _reads("an own name in the place of a supplied one", "def gcd(a, b):\n    return 7\ncount = 5\nprint(gcd(1, 2), count)", "", "7 5"),
    _reads("a supplied name that the program binds later", "deque = deque([1, 2])\nprint(len(deque))", "", "2", there=False, here=True),
    _reads("recursion of 20,000 calls", "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(20000))", "", "20000"),
    _reads("deep recursion with a cache", "@lru_cache(None)\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(20000))", "", "20000"),
    _reads("a future import", "from __future__ import annotations\ndef f(a: NoSuchType) -> int:\n    return 1\nprint(f(2))", "", "1", there=False, here=True),
    _reads("200 MB", "data = bytearray(b'1') * (200 << 20)\nprint(len(data) >> 20)", "", "200"),
    _reads("900 MB", "data = bytearray(b'1') * (900 << 20)\nprint(len(data) >> 20)", "", "900"),
    # reading and ending
    _reads("readline", "import sys\nprint(int(sys.stdin.readline()) + int(input()))", "1\n2\n", "3"),
    _reads("lines of stdin", "import sys\nprint(sum(int(line) for line in sys.stdin))", "1\n2\n", "3"),
    _reads("bytes of stdin", "import sys\nprint(len(sys.stdin.buffer.read()))", "abc", "3", there=False, here=True),
    _reads("a main", "def main():\n    print(input())\nif __name__ == '__main__':\n    main()", "x", "x"),
    _reads("exit", "import sys\nprint(1)\nsys.exit()", "", "1"),
    _reads("exit with a code", "import sys\nprint(1)\nsys.exit(1)", "", "1", here=False, row="the exit code of a program"),
    _reads("an error after the output", "print(1)\nraise ValueError('late')", "", "1", there=False),
    _reads("a division by zero", "print(1 // 0)", "", "1", there=False),
    _reads("too little input", "print(input(), input())", "a", "a a", there=False),
    _reads("no Python", "print(1", "", "1", there=False),
    _reads("a return at the end", "print(int('1'))\nreturn  # done", "", "1", here=False, row="`return` outside of a function"),
    _reads("an own global", "total = 0\ndef add(n):\n    global total\n    total += n\nadd(3)\nprint(total)", "", "3", there=False, here=True),
    _reads("an integer of 5,000 digits", "print(10 ** 5000)", "", "1" + "0" * 5000, there=False, here=True),
    _reads("a sorted set", "print(*sorted(set(input().split())))", "b a b", "a b"),
    # blocks
    Program("an example behind the program", f"{_fenced(_ADD)}\nOutput:\n```\n3\n```", ["1 2"], ["3"]),
    Program("a long example behind the program", f"{_fenced(_ADD)}\n```\n1 2 3 4 5 6 7 8 9 10 11\n```", ["1 2"], ["3"], there=False, here=True, row=_BLOCKS),
    Program("two programs", f"{_fenced('print(12345678901234)')}Better:\n{_fenced(_ADD)}", ["1 2"], ["3"]),
    Program("no line break behind the language", f"```python {_ADD}\n```", ["1 2"], ["3"]),
    Program("one line", f"```py {_ADD}```", ["1 2"], ["3"]),
    Program("no language", f"```\n{_ADD}\n```", ["1 2"], ["3"]),
    Program("capitals", f"```Python\n{_ADD}\n```", ["1 2"], ["3"]),
    Program("no fence", _ADD, ["1 2"], ["3"]),
    Program("a fence that is not closed", f"```python\n{_ADD}\n", ["1 2"], ["3"], there=False, here=True, row=_BLOCKS),
    Program("blanks before the program", f"```python\n\n   {_ADD}\n```", ["1 2"], ["3"]),
    Program("words alone", "I am not able to solve this problem, I am sorry.", ["1 2"], ["3"], there=False),
    # calls
    _returns("a wrapped value", "def f(n):\n    return n + 1", [3], [4]),
    _returns("a list of one that was wrapped", "def f(n):\n    return [n + 1]", [3], [4]),
    _returns("a list of one in a list", "def f(n):\n    return [n + 1]", [3], [[4]]),
    _returns("the part of a longer list", "def f(n):\n    return n + 1", [3], [4, 5], here=False, row=_VALUES),
    _returns("a tuple", "def f(n):\n    return (n, n)", [3], [[3, 3]]),
    _returns("a list of tuples", "def f(n):\n    return [(n, n)]", [3], [[[3, 3]]]),
    _returns("text arguments, a JSON value a line", "def f(a, b):\n    return a + b", "[1]\n[2]", "[1, 2]"),
    _returns("a text in JSON", "def f(a):\n    return a[::-1]", '"ab"', '"ba"'),
    _returns("a text that looks like a number", "def f(n):\n    return str(n)", [12], "12", there=False, here=True, row=_VALUES),
    _returns("a number that looks like a text", "def f(n):\n    return n", [12], "12"),
    _returns("a text that is no JSON", "def f(n):\n    return 'n' * n", [2], "nn", there=False, here=True, row=_VALUES),
    _returns("integer keys of an argument", "def f(d):\n    return max(d) + 1", [{"1": 2, "3": 4}], [4]),
    _returns("integer keys of a second argument", "def f(n, d):\n    return max(d) + n", [1, {"1": 2, "3": 4}], [4], there=False, here=True, row="text keys of a dictionary that are integers"),
    _returns("integer keys of a value", "def f(n):\n    return {n: n}", [3], [{"3": 3}]),
    _returns("a method of Solution", "class Solution:\n    def f(self, a: List[int]) -> int:\n        return max(a)", [[1, 2]], [2]),
    _returns("a deep function", "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)", [20000], [20000]),
    _returns("a near decimal", "def f(n):\n    return n + 1e-9", [3], [3], there=False),
    _returns("None for a value", "def f(n):\n    print(n)", [3], [3], there=False),
    _returns("another name", "def g(n):\n    return n", [3], [3], there=False),
]  # fmt: skip
