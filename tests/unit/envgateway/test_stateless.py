"""Only programs with a text that shows no remaining state may be executed anew in one process."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.envgateway.sandbox.bare.endings import CaseRecord, records
from services.envgateway.sandbox.bare.harness.stateless import LARGEST_SOURCE, is_stateless, supply

STATELESS = {
    "a sum": "print(sum(map(int, input().split())))",
    "a function": "def f(x): return (x + 3) * 7",
    "a default is made anew": "def f(x, seen=[]):\n    seen.append(x)\n    return len(seen)",
    "a method": "class Solution:\n    def f(self, n):\n        return self.g(n) + 1\n    def g(self, n):\n        return n",
    "listed modules": "import math\nfrom collections import Counter\nfrom functools import lru_cache\n@lru_cache\ndef f(x): return math.gcd(x, 4) + len(Counter('aab'))",
    "streams": "import sys\nfor line in sys.stdin:\n    sys.stdout.write(line.strip())\nsys.exit(0)",
    "fast input": "import sys\ninput = sys.stdin.buffer.readline\nprint(input().split())",
    "parts of listed modules": "from sys import stdin\nimport re\nfrom operator import itemgetter\nimport copy\nfor line in stdin:\n    print(re.sub('a', 'b', line), copy.copy([line]))",
    "an entry": "def main():\n    print(1)\nif __name__ == '__main__':\n    main()",
    "a format of values": "print('{:>{}.2f} {x}'.format(1.5, 8, x=2), '{}'.format('a.b'))",
    "an error that is caught": "try:\n    x = int('a')\nexcept ValueError as error:\n    x = 0",
}  # fmt: skip

REFUSED = {
    "another module": "import os",
    "an attribute by its name": "from operator import attrgetter",
    "a stream's descriptor": "from sys import stdin\nstdin.detach()",
    "a part of a module": "from random import random",
    "everything of a module": "from math import *",
    "a relative import": "from . import math",
    "a module by another name": "import math\nmath = 1",
    "a module as a value": "import math\nm = math",
    "a module's own": "import collections\ncollections._sys",
    "a path through a module": "import heapq\nheapq.heappop.__globals__",
    "unlisted of sys": "import sys\nsys.modules.clear()",
    "a stream's end": "import sys\nsys.stdout.close()",
    "a set attribute": "def f(): pass\nf.x = 1",
    "an attribute in a loop": "def f(): pass\nfor f.x in (1,): pass",
    "a deleted attribute": "def f(): pass\ndel f.x",
    "setattr": "setattr(int, 'x', 1)",
    "open": "open('x', 'w')",
    "open, which is also a name": "def f():\n    open('x', 'w')\nopen = print",
    "an import by name": "__import__('os')",
    "globals": "globals()['x'] = 1",
    "type": "type('A', (), {})",
    "exec": "exec('import os')",
    "a frame": "(i for i in ()).gi_frame",
    "a frame by a name of its own": "def gi_frame(): pass\n(i for i in ()).gi_frame",
    "a pattern": "match 1:\n    case int(real=x): pass",
    "with": "with x: pass",
    "an end to come": "def g():\n    try:\n        yield 1\n    finally:\n        print(2)",
    "a finalizer": "class A:\n    def __del__(self): print(1)",
    "a base": "class A(list): pass",
    "a metaclass": "class A(metaclass=int): pass",
    "every exception": "try: f()\nexcept: pass",
    "async": "async def f(): pass",
    "dunder": "x = __builtins__",
    "dunder by import": "import math as __builtins__",
    "a decorator": "def d(f): return f\n@d\ndef f(): pass",
    "another text under its cookie": "# coding: utf-7\n#+AAoAJwAnACc-\nimport os\n#+AAoAJwAnACc-\n",
    "an attribute by a format": "from collections import namedtuple\nx = '{0.__globals__}'.format(namedtuple)",
    "an attribute by a nested format": "x = '{:{0.real}}'.format(1)",
    "a format that is made": "x = ('{0' + '.real}').format(1)",
    "a format by its name": "x = '{0.real}'.format_map\ndef format_map(): pass",
    "a class that is told of another": "from typing import Iterable\nIterable.register(int)\ndef register(): pass",
    "a stream's settings": "from sys import stdout\nstdout.reconfigure(encoding='latin-1')\ndef reconfigure(): pass",
    "two modules by one name": "import sys as m\nm.stdin\nimport math as m",
    "a function that shows its own": "from copy import deepcopy\ndeepcopy([1], {})",
    "no program": "def f(",
    "what another encoding hides": "# coding: utf-7\nACM = 0\n0, +ACM-1; import os",
    "too long": "x = 1\n" * (LARGEST_SOURCE // 6 + 1),
}  # fmt: skip


@pytest.mark.parametrize("code", STATELESS.values(), ids=STATELESS.keys())
def test_a_program_that_only_computes_is_stateless(code: str) -> None:
    assert is_stateless(code.encode())


@pytest.mark.parametrize("code", REFUSED.values(), ids=REFUSED.keys())
def test_a_program_that_could_reach_later_executions_is_not(code: str) -> None:
    assert not is_stateless(code.encode())


@pytest.mark.parametrize(
    "names",
    ["attrgetter('__globals__')(f)", "get_overloads(f)", "random.seed(1)", "Formatter()", "wraps(f)", "ListNode"],
)
def test_names_of_a_prelude_are_allowed_only_in_computations(names: str) -> None:
    code = f"class Solution:\n    def f(self, n): return n\n    def seed(self): pass\ndef g(f): return {names}".encode()
    assert not is_stateless(code)
    name = re.split(r"\W", names)[0]
    assert is_stateless(code + f"\ndef h():\n    {name} = None".encode()), "the program's own, and not supplied"
    namespace: dict[str, object] = {}
    supply(namespace, compile(code, "", "exec"))
    assert name not in namespace


def test_an_own_name_in_the_place_of_a_supplied_one_is_not_looked_for_where_its_absence_is_caught() -> None:
    code = "try:\n    print(sample)\nexcept {}:\n    print(0)\nsample = 1"
    assert is_stateless(code.format("ValueError").encode())
    assert not is_stateless(code.format("NameError").encode())
    assert not is_stateless(code.format("Exception").encode())


@pytest.mark.parametrize("names", ["Counter(n)", "lru_cache(None)", "gcd(n, 4)", "heappop(n)", "itemgetter(1)", "inf"])
def test_a_method_may_name_computing_functions_without_an_import(names: str) -> None:
    code = f"class Solution:\n    def f(self, n: List[int]) -> Optional[int]: return {names}"
    assert is_stateless(code.encode())


def test_a_module_by_the_name_of_a_supplied_one_is_none() -> None:
    assert is_stateless(b"import math\nmath.gcd(1, 2)")
    assert not is_stateless(b"def f():\n    import math as re")


_NUMBERS = st.integers(0, 2**31 - 1)
_TIMES = st.floats(0, 1e6)
_RECORDS = st.builds(
    CaseRecord, _NUMBERS, st.integers(0, 3), st.booleans(), _NUMBERS, _TIMES, _TIMES, _NUMBERS,
    st.binary(max_size=50), st.binary(max_size=50), st.binary(max_size=50), st.binary(max_size=9),
)  # fmt: skip


@given(st.lists(_RECORDS, max_size=5))
def test_records_of_cases_survive_their_way(sent: list[CaseRecord]) -> None:
    assert list(records(b"".join(record.packed() for record in sent))) == sent


@given(_RECORDS, st.data())
def test_a_record_that_is_cut_is_refused(sent: CaseRecord, data: st.DataObject) -> None:
    packed = sent.packed()
    cut = data.draw(st.integers(1, len(packed) - 1))
    with pytest.raises(ValueError, match="record"):
        list(records(packed[:cut]))
