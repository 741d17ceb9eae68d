"""Tells from a program's text, without running the program, whether a case can leave state for the next case.

A program that passes is executed anew for each case, in a namespace of its own, in one process after the other cases. A
message from one case to another must then be outside of that namespace, and the program cannot reach there: the text
names only functions that compute from their arguments, only methods of plain data as attributes, and of a module only
the names listed here. The program opens no file, starts no process, and sets no attribute. ``sys`` is there for its
streams, which are each case's own.

A refusal costs a process for each case, never a verdict; in doubt the answer is no.
"""

from __future__ import annotations

import abc
import ast
import builtins
import collections
import fractions
import io
import itertools
import math
import operator
import re
import types
from typing import Any

from . import prelude

LARGEST_SOURCE = 20_000  # bytes; a longer one is not worth the look

_NODES = (
    ast.Module, ast.FunctionDef, ast.Lambda, ast.arguments, ast.arg, ast.Return, ast.ClassDef, ast.Delete, ast.Assign,
    ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Raise, ast.Try, ast.ExceptHandler, ast.Assert, ast.Import,
    ast.ImportFrom, ast.alias, ast.Global, ast.Nonlocal, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.BoolOp,
    ast.NamedExpr, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp, ast.comprehension, ast.Yield, ast.YieldFrom, ast.Compare, ast.Call, ast.keyword, ast.FormattedValue,
    ast.JoinedStr, ast.Constant, ast.Attribute, ast.Subscript, ast.Starred, ast.Name, ast.List, ast.Tuple, ast.Slice,
    ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FUNCTIONS = _words("""
abs all any ascii bin bool bytearray bytes chr complex dict divmod enumerate filter float format frozenset hex input int
isinstance issubclass iter len list map max min next oct ord pow print range repr reversed round set slice sorted str sum
tuple zip True False None NotImplemented Ellipsis ArithmeticError AssertionError AttributeError EOFError Exception
IndexError KeyError LookupError NameError NotImplementedError OverflowError StopIteration TypeError UnicodeError ValueError
ZeroDivisionError
""")
_BUILTINS = frozenset(vars(builtins))
# names that a module may be asked for; functions that remember, draw or set state are not among them
MODULES: dict[str, frozenset[str]] = {
    "math": frozenset(name for name in dir(math) if not name.startswith("_")),
    "collections": frozenset(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple")),
    "heapq": frozenset(("heapify", "heappop", "heappush", "heappushpop", "heapreplace", "merge", "nlargest", "nsmallest")),
    "bisect": frozenset(("bisect", "bisect_left", "bisect_right", "insort", "insort_left", "insort_right")),
    "itertools": frozenset(name for name in dir(itertools) if not name.startswith("_")),
    "functools": frozenset(("cache", "cmp_to_key", "lru_cache", "partial", "reduce")),
    "fractions": frozenset(("Fraction",)),
    "copy": frozenset(("copy",)),  # deepcopy passes a list of its own as the memo
    "operator": frozenset(("add", "and_", "floordiv", "itemgetter", "mod", "mul", "neg", "or_", "sub", "truediv", "xor")),
    "re": frozenset(("I", "IGNORECASE", "M", "MULTILINE", "compile", "escape", "findall", "finditer", "fullmatch", "match",
                     "search", "split", "sub", "subn")),
    "sys": frozenset(("exit", "maxsize", "setrecursionlimit", "stderr", "stdin", "stdout")),
    "string": frozenset(("ascii_letters", "ascii_lowercase", "ascii_uppercase", "digits", "hexdigits", "punctuation")),
    "typing": frozenset(("Any", "Callable", "Dict", "Iterable", "Iterator", "List", "Optional", "Sequence", "Set", "Tuple",
                         "Union")),
}  # fmt: skip
_STREAMS = frozenset(
    ("sys.stdin", "sys.stdin.read", "sys.stdin.readline", "sys.stdin.readlines", "sys.stdin.buffer.read",
     "sys.stdin.buffer.readline", "sys.stdin.buffer.readlines", "sys.stdout.write", "sys.stdout.flush", "sys.stderr",
     "sys.stderr.write", "sys.maxsize", "sys.exit", "sys.setrecursionlimit")
)  # fmt: skip
_DATA = (str, bytes, bytearray, list, tuple, dict, set, frozenset, int, float, complex, range, slice, collections.deque,
         collections.Counter, collections.defaultdict, collections.OrderedDict, fractions.Fraction, re.Pattern, re.Match)  # fmt: skip


def _public(kinds: Any) -> frozenset[str]:
    return frozenset(name for kind in kinds for name in dir(kind) if not name.startswith("_"))


_ATTRIBUTES = _public(_DATA) | _public((io.TextIOWrapper,)) & _words("read readline readlines write flush")
# attributes that lead from an object to its frame, its module or other code, or change a shared class or a stream
_LEADING_OUT = _public(
    (types.FunctionType, types.MethodType, types.CodeType, types.FrameType, types.TracebackType, types.GeneratorType,
     types.ModuleType, types.BuiltinFunctionType, type, abc.ABCMeta, Exception, classmethod, property)
) | (_public((io.TextIOWrapper, io.BufferedReader, io.BytesIO)) - _ATTRIBUTES)  # fmt: skip
_FIELD_WITH_A_PATH = re.compile(r"\{[^{}:!]*[.\[]")  # of a format: such a field reads any attribute of an object
# of the names that a prelude supplies without an import: those that the program may use
HARMLESS = frozenset(name for name in dir(operator) if not name.startswith("_")).union(
    *(MODULES.get(m, ()) for m in prelude.STAR)
) - {"attrgetter", "methodcaller", *prelude.STAR}
_HARMFUL = prelude.NAMES - HARMLESS
_SUPPLIED = HARMLESS | MODULES.keys()
_CATCH_NAMES = frozenset(("Exception", "NameError"))
_DECORATED_BY = frozenset(("cache", "lru_cache", "functools", "staticmethod", "classmethod"))


def supply(namespace: dict[str, Any], code: types.CodeType) -> None:
    """Supply the names of ``prelude`` of which no execution can make state; without another, an execution fails that the
    name's meaning decides, and is repeated in a process of its own."""
    prelude.prepare(namespace, code, _SUPPLIED)


def is_stateless(source: bytes) -> bool:
    """Whether no state of one execution is left for the next, with the names of ``supply``. The program must compile.

    >>> is_stateless(b"def f(x): return (x + 3) * 7"), is_stateless(b"print(sum(map(int, input().split())))")
    (True, True)
    >>> is_stateless(b"def f(x, seen=[]): seen.append(x); return len(seen)")  # made anew with each execution
    True
    >>> is_stateless(b"import os"), is_stateless(b"def f(x): f.x = x"), is_stateless(b"g = (i for i in ()).gi_frame")
    (False, False, False)
    """
    if len(source) > LARGEST_SOURCE:
        return False
    try:
        tree = ast.parse(source.decode().removeprefix("\ufeff"))  # as the compiler gets it: a cookie names no encoding
        return _Program(tree).is_stateless()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _all_nodes(tree: ast.AST) -> list[ast.AST]:
    """As ``ast.walk``: each node behind the one that holds it; in a third of the time."""
    found = [tree]
    for node in found:  # which grows
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                found.append(value)
            elif type(value) is list:
                found += [part for part in value if isinstance(part, ast.AST)]
    return found


class _Program:
    def __init__(self, tree: ast.Module) -> None:
        self._nodes = _all_nodes(tree)
        self._modules: dict[str, str] = {}  # the meaning of a name
        self._inside: set[int] = set()  # nodes that their attribute has been looked at with
        self._methods = frozenset(node.name for node in self._nodes if type(node) is ast.FunctionDef)
        self._own = self._bound()
        self._hides = bool(self._own & _HARMFUL)  # perhaps read before they are bound

    def is_stateless(self) -> bool:
        imports = [node for node in self._nodes if type(node) in (ast.Import, ast.ImportFrom)]
        if self._methods & _LEADING_OUT or not all(map(self._is_import_known, imports)):
            return False
        if self._own & self._modules.keys():
            return False
        for node in self._nodes:
            check = _CHECKS.get(type(node))
            if not (check(self, node) if check is not None else type(node) in _PLAIN):
                return False
        return True

    def _bound(self) -> set[str]:
        """Every name that is given another meaning somewhere."""
        names: set[str] = set()
        for node in self._nodes:
            match node:
                case ast.Name(ctx=ast.Store() | ast.Del()):
                    names.add(node.id)
                case ast.arg():
                    names.add(node.arg)
                case ast.FunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.ExceptHandler(name=str()):
                    names.add(str(node.name))
                case ast.ImportFrom():
                    names |= {name.asname or name.name for name in node.names}
        return names

    def _is_import_known(self, node: ast.AST) -> bool:
        match node:
            case ast.Import():
                for name in node.names:
                    known_as = name.asname or name.name
                    if name.name not in MODULES or self._modules.get(known_as, name.name) != name.name:
                        return False
                    if known_as in _SUPPLIED and known_as != name.name:
                        return False
                    self._modules[known_as] = name.name
                return all(map(self._may_name, self._modules))
            case ast.ImportFrom():
                listed = MODULES.get(node.module or "", frozenset()) if not node.level else frozenset()
                return all(name.name in listed and self._may_name(name.asname or name.name) for name in node.names)
        return True

    @staticmethod
    def _may_name(name: str) -> bool:
        """Names of the interpreter keep their meaning, and names with underscores are its own."""
        return not name.startswith("__") and (name not in _BUILTINS or name in _FUNCTIONS)

    def _is_name_known(self, node: ast.Name) -> bool:
        if id(node) in self._inside:
            return True
        if node.id in _HARMFUL and node.id not in self._own and node.id not in self._modules:
            return False
        plain = node.id == "__name__" and isinstance(node.ctx, ast.Load)
        return node.id not in self._modules and (plain or self._may_name(node.id))

    def _is_definition_known(self, node: ast.FunctionDef | ast.ClassDef) -> bool:
        decorators = {inner.id for one in node.decorator_list for inner in ast.walk(one) if isinstance(inner, ast.Name)}
        plain = isinstance(node, ast.FunctionDef) or not (node.bases or node.keywords)
        return plain and self._may_name(node.name) and decorators <= _DECORATED_BY

    def _is_handler_known(self, node: ast.ExceptHandler) -> bool:
        # the handler may catch the end of the stack, whose depth differs between runs
        caught = {inner.id for inner in ast.walk(node.type) if isinstance(inner, ast.Name)} if node.type else {"all"}
        return not ("all" in caught or (self._hides and caught & _CATCH_NAMES)) and self._may_name(node.name or "")

    def _is_attribute_known(self, node: ast.Attribute) -> bool:
        if not isinstance(node.ctx, ast.Load):
            return False
        if id(node) in self._inside:
            return True
        if node.attr in ("format", "format_map"):
            text = node.value.value if isinstance(node.value, ast.Constant) else None
            return node.attr == "format" and isinstance(text, str) and not _FIELD_WITH_A_PATH.search(text)
        path, root = [node.attr], node.value
        while isinstance(root, ast.Attribute):
            path.insert(0, root.attr)
            root = root.value
        if not (isinstance(root, ast.Name) and root.id in self._modules):
            return not node.attr.startswith("_") and (node.attr in _ATTRIBUTES or node.attr in self._methods)
        module = self._modules[root.id]
        if module == "sys":
            known = any(".".join(("sys", *path[:length])) in _STREAMS for length in range(1, len(path) + 1))
        else:
            known = path[0] in MODULES[module]
        inner: ast.AST = node.value  # the parts of a known path; the rest is data
        while isinstance(inner, ast.Attribute):
            self._inside.add(id(inner))
            inner = inner.value
        self._inside.add(id(inner))
        return known and all(not part.startswith("_") for part in path) and self._follows(module, path)

    def _follows(self, module: str, path: list[str]) -> bool:
        """Whether an attribute of a module's object is allowed for plain data, too."""
        if module == "sys":
            whole = ".".join(("sys", *path))
            return whole in _STREAMS or (path[0] in ("stdin", "stderr") and path[-1] in _ATTRIBUTES and len(path) == 2)
        return all(part in _ATTRIBUTES for part in path[1:])


_CHECKS: dict[type[ast.AST], Any] = {
    ast.Attribute: _Program._is_attribute_known,
    ast.Name: _Program._is_name_known,
    ast.FunctionDef: _Program._is_definition_known,
    ast.ClassDef: _Program._is_definition_known,
    ast.arg: lambda self, node: self._may_name(node.arg),
    ast.Try: lambda self, node: not node.finalbody,  # a generator that is left may come to its end in another case
    ast.ExceptHandler: _Program._is_handler_known,
}
_PLAIN = frozenset(kind for one in _NODES for kind in (one, *one.__subclasses__()))
