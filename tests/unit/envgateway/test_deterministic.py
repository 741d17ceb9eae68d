"""Which programs say the same in every run, by their text."""

from __future__ import annotations

import pytest

from services.envgateway.memory.deterministic import LARGEST_SOURCE, is_deterministic

SAME = {
    "a sum": "print(sum(map(int, input().split())))",
    "no program": "print((1",
    "an unknown name": "print(foo)",
    "keys of sorting": "print(max([1, 2], key=lambda x: -x), sorted(['a'], key=len))\n[1].sort(key=lambda x: x)",
    "fast input": "import sys\ninput = sys.stdin.readline\nn, *a = map(int, input().split())\nsys.stdout.write(str(n))\nsys.exit(1)",
    "lines": "import sys\nfor line in sys.stdin:\n    print(line, file=sys.stderr)",
    "a dictionary": "from collections import Counter, defaultdict\nd = defaultdict(int)\nfor k, v in Counter(input()).items():\n    d[k] += v\nprint(d)",
    "the size of a set": "print(len(set(input())), 3 in {1, 2}, set('ab') == set('ba'))",
    "a format": "print('{:.2f} {}'.format(1.0, 2), f'{1:>3}', '%d' % 2)",
    "recursion": "import functools\n@functools.lru_cache(maxsize=None)\ndef f(x):\n    return x if x < 2 else f(x - 1) + f(x - 2)\nprint(f(9))",
    "a named lambda": "f = lambda x: x + 1\nprint(f(2))",
    "an error that is caught": "try:\n    print(int('a'))\nexcept (ValueError, KeyError):\n    print(0)",
    "a generator": "def f(s):\n    return sum(1 for c in s if c in 'aeiou')",
    "combinations": "import itertools, heapq\nprint(list(itertools.combinations(range(3), 2)))\nh = []\nheapq.heappush(h, 1)",
    "own names in the place of supplied ones": "def gcd(a, b):\n    count = a\n    return count\nprint(gcd(1, 2))",
    "nothing": "x = None\nprint(x is None)",
}  # fmt: skip

CHANCE = {
    "the order of a set": "print(set(input()))",
    "a set as a list": "print(list(set('ab')))",
    "a sorted set, which NaN leaves in its order": "print(sorted(set(map(float, input().split()))))",
    "a set by a name": "x = {'a', 'b'}\nprint(x)",
    "a set of sets": "print(frozenset('ab'))",
    "a set of keys": "a = {}\nb = {}\nprint(list(a.keys() - b.keys()))",
    "keys by a name": "a = {'x': 1}.keys\nprint(a())",
    "the largest of keys": "a = {}\nprint(max(a.keys(), a.keys()))",
    "id": "print(id(1))",
    "hash": "print(hash('a'))",
    "random": "import random\nprint(random.random())",
    "time": "import time\nprint(time.time())",
    "random without an import": "print(randint(1, 6))",
    "an address without an import": "print(permutations([1]))",
    "a supplied name that is another function's own": "def h():\n    sample = 1\ndef g():\n    return sample([1, 2], 1)\nprint(g())",
    "a supplied name that is read before it is bound": "print(sample([1, 2], 1))\nsample = 1",
    "the address of a lambda": "print(lambda: 0)",
    "the address of a function": "def f(): pass\nprint(f)",
    "an address in an f-string": "def f(): pass\nprint(f'{f}')",
    "a function by another name": "def f(): pass\ng = f\nprint(g)",
    "two names of a lambda": "f = g = lambda: 0\nprint(g)",
    "a lambda in a list": "for f in [lambda: 0]: print(f)",
    "a lambda of a lambda": "x = lambda: (lambda: 0)\nprint(x())",
    "a lambda as a default": "def g(x=lambda: 0): print(x)\ng()",
    "a lambda that max returns": "print(max([], default=lambda: 0))",
    "a lambda that reduce returns": "from functools import reduce\nprint(reduce(lambda a, b: a, [], lambda: 0))",
    "a lambda under another's key": "def g(key): return key\nprint(g(key=lambda: 0))",
    "a lambda in a dictionary": "print(dict(key=lambda: 0))",
    "a sort of another kind": "from collections import namedtuple\nprint(namedtuple('P', 'sort')(dict).sort(key=lambda: 0))",
    "a default factory": "from collections import defaultdict\nprint(defaultdict(lambda: 0))",
    "sorted anew": "def sorted(x, key): return key\nprint(sorted(1, key=lambda: 0))",
    "an import of two meanings": "from math import floor as x\nfrom itertools import repeat as x\nprint(x(1))",
    "an iterator": "print(map(int, '1'))",
    "a generator": "print((i for i in ()))",
    "an iterator with two names": "x = y, = map(int, '1')\nprint(x)",
    "an iterator as a start": "print(sum([], map(int, '')))",
    "an iterator that is repeated": "from itertools import repeat\nprint(list(repeat(map(int, ''), 2)))",
    "iterators of iterators": "print(list(map(map, [int], [[1]])))",
    "iter": "print(iter([]))",
    "tee": "from itertools import tee\nprint(tee([1]))",
    "an iterator of a method": "from collections import Counter\nprint(Counter('a').elements())",
    "an iterator of a module": "import re\nprint(re.finditer('a', 'a'))",
    "a function that yields": "def g(): yield 1\nprint(g())",
    "a bound method": "print([].append)",
    "a bound method by a name": "x = [].append\nprint(x)",
    "a stream": "import sys\nprint(sys.stdin)",
    "a method of a stream": "from sys import stdin\nprint(stdin.readline)",
    "input as a value": "import sys\ninput = sys.stdin.readline\nprint(input)",
    "a function of a module": "import heapq\nprint(heapq.nlargest)",
    "a cache": "from functools import cache\nprint(cache(int))",
    "a decorator that gives another": "from functools import lru_cache\n@lru_cache(lambda *a: 0)\ndef f(): pass",
    "an attribute in a format": "print('{0.__init__}'.format(1))",
    "a format within a format": "print('{:{}}'.format(1, 2))",
    "a format from a type": "print(str.format('{0.x}', 1))",
    "an object": "class A: pass\nprint(A())",
    "a solution": "class Solution:\n    def f(self): return 1",
    "identity": "x = [1]\ny = [1]\nprint(x[0] is y[0])",
    "every exception": "try:\n    f()\nexcept Exception:\n    pass",
    "the words of an exception": "try:\n    f()\nexcept KeyError as e:\n    print(e)",
    "the stack's end": "import sys\nsys.setrecursionlimit(10**9)",
    "what another encoding hides": "# coding: utf-7\nACM = 0\n0, +ACM-1; import os",
    "too long": "x = 1\n" * (LARGEST_SOURCE // 6 + 1),
    "too long in bytes": "x = '" + "\u00e9" * (LARGEST_SOURCE // 2) + "'",
}  # fmt: skip


@pytest.mark.parametrize("code", SAME.values(), ids=SAME.keys())
def test_a_program_that_only_computes_is_deterministic(code: str) -> None:
    assert is_deterministic(code)


@pytest.mark.parametrize("code", CHANCE.values(), ids=CHANCE.keys())
def test_a_program_that_can_ask_chance_is_not(code: str) -> None:
    assert not is_deterministic(code)


@pytest.mark.parametrize("entry_point", ["g", "sorted", "f.g", "Solution().f"])
def test_a_function_that_the_program_does_not_define_is_not_called(entry_point: str) -> None:
    assert is_deterministic("def f(x): return x", frozenset(("f",)))
    assert not is_deterministic("def f(x): return x", frozenset(("f", entry_point)))
