"""Tells from a program's text, without running the program, whether each run gives the same output.

Two runs of a program can differ by sources of chance: the time, a random number, an address, the order of a set (hashes
of texts are salted), and the distance to a limit. A program that passes is stateless (``bare.harness.stateless``), which leaves
no clock and no random number, and

* binds no name of the interpreter anew, and defines no class;
* uses objects whose text has an address only where no code can format them: functions are called or given to ``map``,
  ``key`` and the like; iterators and views of dictionaries are consumed where they are made; methods are called where
  they are named;
* uses sets only for their size, for membership and for equality;
* compares identity only with None, True and False;
* catches only errors that no limit raises.

A text that does not compile has no run at all. In doubt the answer is no, which costs a judgement and never a verdict.
"""

from __future__ import annotations

import ast
import builtins
import collections
import fractions
import string
import symtable

from services.common.text.parsing import PARSING, parsed_module
from services.envgateway.sandbox.bare.harness.prelude import NAMES
from services.envgateway.sandbox.bare.harness.stateless import HARMLESS, MODULES, is_stateless

LARGEST_SOURCE = 2048  # bytes; the look is made on the event loop


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BUILTINS = frozenset(vars(builtins))
_KINDS = (str, bytes, bytearray, list, tuple, dict, int, float, complex, range, collections.deque, collections.Counter,
          collections.defaultdict, collections.OrderedDict, fractions.Fraction)  # fmt: skip
_METHODS = {name for kind in _KINDS for name in dir(kind) if not name.startswith("_")} - _words(
    "elements format format_map"
)
_FIELDS = _words("real imag numerator denominator")
_VIEWS = _words("keys items")
_READERS = {f"sys.{name}" for name in _words("""
stdin.read stdin.readline stdin.readlines stdin.buffer.read stdin.buffer.readline stdin.buffer.readlines stdout.write
stdout.flush stderr.write stderr.flush exit
""")}  # fmt: skip
_STREAMS = _words("sys.stdin")  # to be iterated
_FILES = _words("sys.stderr sys.stdout")  # to be printed to
_PARTS = {
    "sys.maxsize",
    *(
        f"{module}.{name}"
        for module in ("math", "string", "collections", "heapq", "bisect", "operator", "typing", "fractions")
        for name in MODULES[module] - _words("namedtuple merge nlargest nsmallest")
    ),
}
_DECORATORS = _words("functools.cache functools.lru_cache")
_LAZY = _words("""
map filter zip enumerate reversed itertools.accumulate itertools.chain itertools.combinations
itertools.combinations_with_replacement itertools.islice itertools.pairwise itertools.permutations itertools.product
""")  # fmt: skip
_CONSUMERS = _words("list tuple sorted sum any all min max dict set len collections.Counter collections.deque")
_CONSUMING_METHODS = _words("join extend")
_APPLYING = _words("map filter functools.reduce")  # their first argument is called
_BY_KEY = _words("sorted min max")
_SETS = _words("set")
_REFUSED = _words("frozenset iter next")
_CAUGHT = _words("""
ArithmeticError AssertionError AttributeError EOFError IndexError KeyError LookupError NameError OverflowError StopIteration
TypeError UnicodeError ValueError ZeroDivisionError
""")


def is_deterministic(code: str, entry_points: frozenset[str] = frozenset()) -> bool:
    """Whether every run of the program on one input ends in one way. ``entry_points``: the functions that are called.

    >>> is_deterministic("print(sum(map(int, input().split())))"), is_deterministic("print(")
    (True, True)
    >>> is_deterministic("print(set(input()))"), is_deterministic("print(id(1))"), is_deterministic("print(f := set)")
    (False, False, False)
    """
    if len(code) > LARGEST_SOURCE:
        return False
    try:
        source = code.encode()
        tree = parsed_module(code.removeprefix("\ufeff"))
    except SyntaxError:
        return len(source) <= LARGEST_SOURCE
    except (ValueError, RecursionError, MemoryError):
        return False
    if len(source) > LARGEST_SOURCE:
        return False
    with PARSING:  # it parses too, and imports nothing of Rollmill
        stateless = is_stateless(source) and not _uses_supplied(code)
    if not stateless:
        return False
    try:
        return _Look(tree).is_deterministic(entry_points)
    except RecursionError:
        return False


def _uses_supplied(code: str) -> bool:
    """Whether a name may have the meaning that the ``prelude`` gives it: some draw numbers."""
    top = symtable.symtable(code, "", "exec")
    symbols = {symbol.get_name(): symbol for symbol in top.get_symbols()}
    own = {name for name, it in symbols.items() if it.is_imported() or (it.is_namespace() and name in HARMLESS)}
    tables = [top]
    for table in tables:  # which grows
        tables += table.get_children()
        used = {symbol.get_name() for symbol in table.get_symbols() if table is top or symbol.is_global()}
        if used & NAMES - own:
            return True
    return False


class _Look:
    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._parents = {id(child): node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._imported: dict[str, str] = {}  # name -> module or module.part
        self._called: set[str] = set()  # names of functions
        self._bound: set[str] = set()  # names of data
        self._decorating: set[int] = set()
        self._is_ambiguous = False  # a name refers to two imports

    def is_deterministic(self, entry_points: frozenset[str]) -> bool:
        for node in self._nodes:
            self._note(node)
        defined = {node.name for node in self._nodes if isinstance(node, ast.FunctionDef)}
        own = self._bound | defined | (self._called - _words("input print"))
        if self._is_ambiguous or own & (_BUILTINS | self._imported.keys()) or self._imported.keys() & _BUILTINS:
            return False
        return entry_points <= defined and all(map(self._is_known, self._nodes))

    def _note(self, node: ast.AST) -> None:
        """Record the value of each name."""
        match node:
            case ast.Import(names=names):
                for name in names:
                    self._import(name.asname or name.name, name.name)
            case ast.ImportFrom(module=str(module), names=names):
                for name in names:
                    self._import(name.asname or name.name, f"{module}.{name.name}")
            case ast.FunctionDef():
                self._called.add(node.name)
                self._decorating |= {id(inner) for one in node.decorator_list for inner in ast.walk(one)}
            case ast.Name(ctx=ast.Store() | ast.Del()):
                (self._called if self._names_a_function(node) else self._bound).add(node.id)
            case ast.arg():
                self._bound.add(node.arg)

    def _import(self, name: str, path: str) -> None:
        self._is_ambiguous |= self._imported.setdefault(name, path) != path

    def _names_a_function(self, name: ast.Name) -> bool:
        match self._parents[id(name)]:
            case ast.Assign(targets=[target], value=ast.Lambda()):
                return target is name
            case ast.Assign(targets=[target], value=ast.Attribute() as value):
                return target is name and self._path(value) in _READERS
        return False

    def _path(self, node: ast.AST) -> str:
        """The name that the interpreter or a module gave to the object; empty for objects of the program."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        root = self._imported.get(node.id)
        if root is None:
            return "" if parts or node.id not in _BUILTINS else node.id
        return ".".join((root, *parts))

    def _is_known(self, node: ast.AST) -> bool:
        if id(node) in self._decorating:
            return self._is_decorator(node)
        match node:
            case ast.ClassDef() | ast.Yield() | ast.YieldFrom():
                return False
            case ast.Name(ctx=ast.Load()):
                return self._is_name_known(node)
            case ast.Attribute():
                return self._is_attribute_known(node)
            case ast.Lambda():
                return self._is_only_called(node) or self._is_named(node)
            case ast.GeneratorExp():
                return self._is_consumed(node)
            case ast.Set() | ast.SetComp():
                return self._is_used_as_a_set(node)
            case ast.Call():
                return self._is_call_known(node)
            case ast.Compare():
                return self._is_comparison_known(node)
            case ast.ExceptHandler():
                return node.name is None and self._is_caught(node.type)
        return True

    def _is_decorator(self, node: ast.AST) -> bool:
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return isinstance(node, (ast.Call, ast.keyword, ast.Constant, ast.expr_context))
        whole: ast.AST = node
        while isinstance(self._parents[id(whole)], ast.Attribute):
            whole = self._parents[id(whole)]
        return self._path(whole) in _DECORATORS

    def _is_name_known(self, node: ast.Name) -> bool:
        if node.id in self._called:
            return self._is_only_called(node)
        if isinstance(self._parents[id(node)], ast.Attribute) and self._imported.get(node.id):
            return True  # looked at with the attribute
        return self._is_part_known(node)

    def _is_attribute_known(self, node: ast.Attribute) -> bool:
        parent = self._parents[id(node)]
        if self._path(node):
            return isinstance(parent, ast.Attribute) or self._is_part_known(node)  # a path is looked at as a whole
        if isinstance(parent, ast.Call) and parent.func is node:
            return node.attr in _METHODS or (node.attr == "format" and _is_plain_format(node.value))
        return node.attr in _FIELDS

    def _is_part_known(self, node: ast.expr) -> bool:
        """Whether a use of a name or path of the interpreter or a module is known to be deterministic."""
        path, parent = self._path(node), self._parents[id(node)]
        is_called = isinstance(parent, ast.Call) and parent.func is node
        if not path:
            return True
        if path in _REFUSED or path in _DECORATORS:
            return False
        if path in _LAZY or path in _SETS or path in _READERS or path == "functools.reduce":
            return is_called or (path in _READERS and self._is_named(node))
        if path in _STREAMS:
            return self._is_consumed(node)
        if path in _FILES:
            return isinstance(parent, ast.keyword) and parent.arg == "file"
        return path in _BUILTINS or path in _PARTS

    def _is_named(self, node: ast.expr) -> bool:
        match self._parents[id(node)]:
            case ast.Assign(targets=[ast.Name(id=name)]):
                return name in self._called
        return False

    def _is_only_called(self, node: ast.expr) -> bool:
        """Whether a function is named only in the position of a call, by the program or for the program."""
        parent = self._parents[id(node)]
        match parent:
            case ast.Call(func=func, args=args):
                return func is node or (bool(args) and args[0] is node and self._path(func) in _APPLYING)
            case ast.keyword(arg="key"):
                call = self._parents[id(parent)]
                if not isinstance(call, ast.Call):
                    return False
                sorts = isinstance(call.func, ast.Attribute) and call.func.attr == "sort" and not self._path(call.func)
                return sorts or self._path(call.func) in _BY_KEY
        return False

    def _is_call_known(self, call: ast.Call) -> bool:
        path = self._path(call.func)
        if path in _SETS:
            return len(call.args) == 1 and not call.keywords and self._is_used_as_a_set(call)
        views = isinstance(call.func, ast.Attribute) and call.func.attr in _VIEWS
        return self._is_consumed(call) if path in _LAZY or views else True

    def _is_consumed(self, node: ast.expr) -> bool:
        """Whether an iterable is consumed to its end, or dropped, at the place of its creation."""
        parent = self._parents[id(node)]
        match parent:
            case ast.For(iter=items) | ast.comprehension(iter=items):
                return items is node
            case ast.Starred(ctx=ast.Load()):
                return True
            case ast.Assign(targets=[ast.Tuple() | ast.List()]):
                return True
            case ast.Call(func=ast.Attribute(attr=method) as func, args=[one], keywords=[]) if not self._path(func):
                return one is node and method in _CONSUMING_METHODS
            case ast.Call(func=func, args=args):
                path = self._path(func)
                if path in _LAZY or path == "functools.reduce":
                    return any(argument is node for argument in args[1 if path in _APPLYING else 0 :])
                alone = len(args) == 1 or path not in ("min", "max")
                return path in _CONSUMERS and bool(args) and args[0] is node and alone
        return False

    def _is_used_as_a_set(self, node: ast.expr) -> bool:
        parent = self._parents[id(node)]
        match parent:
            case ast.Call(func=func, args=[one], keywords=[]):
                return one is node and self._path(func) == "len"
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()]):
                return left is not node
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()]):
                return True
        return False

    @staticmethod
    def _is_comparison_known(node: ast.Compare) -> bool:
        return all(
            not isinstance(op, (ast.Is, ast.IsNot))
            or (isinstance(right, ast.Constant) and (right.value is None or isinstance(right.value, bool)))
            for op, right in zip(node.ops, node.comparators, strict=True)
        )

    @staticmethod
    def _is_caught(node: ast.expr | None) -> bool:
        kinds = node.elts if isinstance(node, ast.Tuple) else [node]
        return all(isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in kinds)


def _is_plain_format(node: ast.expr) -> bool:
    """Whether a format only places its arguments: its fields may also ask for attributes."""
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return False
    try:
        fields = list(string.Formatter().parse(node.value))
    except ValueError:
        return False
    return all(not name or name.isalnum() for _, name, _, _ in fields) and all(
        "{" not in (spec or "") for _, _, spec, _ in fields
    )
