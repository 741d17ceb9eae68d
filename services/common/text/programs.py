"""Extracts the program from a completion, in the same way for rewards and workflows.

Independent of tests and of how programs are run.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import re
import symtable
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.common.text.thoughts import after_thoughts

_FENCE = re.compile(r"`{3,}|~{3,}")
_MARKER = re.compile(r"[ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?")  # of an item of a list, which holds the fence
_PYTHON = re.compile(r"(?i:py(?:thon)?)[\d.]*+(?!\w)")
_MARKDOWN = re.compile(r"(?i:markdown|md)\b")
# Code on the line of a fence, told from a file's name, attributes and remarks.
_CODE = re.compile(
    r"""from\s+\S+\s+import\b|import\s|(?:async|class|def|for|if|try|while|with)\b[^\n]*:|@\w|"{3}|'{3}"""
    r"""|\w[\w.]*\(|[\w.,()\[\]*: ]*[ ][-+*/%&|^]?=[ ]|\w[\w., ]*=[^\n]*\("""
)
_SHORT = 20  # characters: a shorter block is more often an example than a program


class _Block(NamedTuple):
    """A fenced block; the largest is the program."""

    label: int  # 2: python, 1: none, 0: another, or a session with prompts
    is_fenced: bool  # not within a line
    is_long: bool
    is_closed: bool
    place: int
    text: str


def fenced_blocks(text: str) -> list[str]:
    """The contents of the fenced blocks, in order; a block that is not closed is none.

    >>> fenced_blocks("```json\\n[1]\\n``` and ```\\n2\\n```")
    ['[1]\\n', '2\\n']
    """
    return [block.text for block in _blocks(text) if block.is_closed]


def program_of(completion: str) -> str:
    """The fenced block that is the program, or the whole text where there is none; a thought is no part of the text.

    Blocks labelled python go before blocks without a label, and these before others; then blocks on lines of their own
    before those within a line, blocks of 20 characters or more before shorter ones, closed ones before one that the end
    of the text cuts off, later ones before earlier ones.

    >>> program_of("First ```python\\nprint(1)\\n``` then ```python\\nprint(2)\\n``` prints ```\\n2\\n```")
    'print(2)\\n'
    """
    answer = after_thoughts(completion)
    return max(_blocks(answer), default=_Block(0, False, False, False, 0, answer)).text


def _blocks(text: str) -> list[_Block]:
    """Fences as in CommonMark. One may also begin at the end of a line of text, and end at the end of a line of code."""
    found: list[_Block] = []
    fence = info = wrapper = ""  # of the open block; the fence around a text in Markdown, whose blocks count
    width = 0  # of the blanks and the marker before the open fence
    held: list[str] = []
    for line in io.StringIO(text, newline="\n"):
        indent = len(line) - len(line.lstrip(" \t"))
        place = _MARKER.match(line).end()  # type: ignore[union-attr]  # of any line
        if fence:
            run = _FENCE.match(line, indent)
            runs = _FENCE.findall(line)
            if run and run[0].startswith(fence) and indent < width + 4:
                found += _block(info, held, len(found), is_closed=True)
                is_next = line[run.end() : run.end() + 1].isalnum()  # a label: the block was not closed
                place = indent if is_next else run.end()
            elif not run and len(runs) % 2 and runs[-1].startswith(fence) and line.rstrip().endswith(runs[-1]):
                held.append(line.rstrip().removesuffix(runs[-1]))
                found += _block(info, held, len(found), is_closed=True)
                place = len(line)
            else:
                held.append(line[min(indent, width) :])
                continue
            fence, held = "", []
        run = _FENCE.match(line, place)
        if run and wrapper and run[0].startswith(wrapper) and not line[run.end() :].strip():
            wrapper = ""
        elif run and _MARKDOWN.match(line, run.end()):
            wrapper = run[0]
        elif run and (run[0][0] == "~" or "`" not in line[run.end() :]):
            fence, info, width = run[0], line[run.end() :], place
        else:
            ends = [run.span() for run in _FENCE.finditer(line, place) if run[0][0] == "`"]
            for (_, begin), (end, _) in zip(ends[::2], ends[1::2], strict=False):
                found += _block("", [line[begin:end]], len(found), is_closed=True, is_fenced=False)
            rest = line[ends[-1][1] :] if len(ends) % 2 else ""
            if len(ends) % 2 and (len(rest.split()) < 2 or _label(rest)[1]):  # else a fence that prose names
                fence, info, width = line[slice(*ends[-1])], rest, 0
    return found + (_block(info, held, len(found), is_closed=False) if fence else [])


def _block(info: str, held: list[str], place: int, *, is_closed: bool, is_fenced: bool = True) -> list[_Block]:
    text = "".join(held)
    label, code = _label(info if is_fenced else text)
    if is_fenced:
        text = code + text
    elif label == 2:
        text = _PYTHON.sub("", text.lstrip(" \t"), count=1).lstrip(" \t").removeprefix("\r")
    else:
        label = 0
    label = 0 if text.lstrip().startswith(">>>") else label
    is_long = len(text.strip()) >= _SHORT
    return [_Block(label, is_fenced, is_long, is_closed, place, text)] if is_closed or text.strip() else []


def _label(info: str) -> tuple[int, str]:
    """The kind of the label, and the code behind it."""
    begun = info.lstrip(" \t")
    python = _PYTHON.match(begun)
    rest = begun[python.end() :].lstrip(" \t") if python else begun
    code = rest if _CODE.match(rest) else ""
    return 2 if python else 1 if code or not rest.strip() else 0, code


def with_preamble(program: str, preamble: str, entry_point: str) -> str:
    """The program behind the preamble of its task; without blanks around it, alone, where it defines the entry point
    itself or there is no preamble.

    >>> with_preamble("    return a + b", "def add(a, b):\\n", "add")
    'def add(a, b):\\n    return a + b'
    """
    return preamble + program if preamble and not _defines(program, entry_point) else program.strip()


def _defines(program: str, name: str) -> bool:
    return (
        bool(name)
        and re.search(rf"^[^\S\n]*+(?:async\s++)?(?:def|class)\s++{re.escape(name)}\b", program, re.MULTILINE)
        is not None
    )


# --- ``ast.parse`` for threads: CPython 3.11 counts the depth of a tree for the whole process, so that two threads that
# build trees at once raise SystemError ("AST constructor recursion depth mismatch").


PARSING = threading.Lock()  # for code that calls ``ast.parse`` itself


def parsed_module(text: str) -> ast.Module:
    """The syntax tree of a module, one thread at a time. Raises what ``ast.parse`` raises."""
    with PARSING:
        return ast.parse(text)


def parsed_expression(text: str | bytes) -> ast.expr:
    """The syntax tree of one expression, one thread at a time. Raises what ``ast.parse`` raises."""
    with PARSING:
        return ast.parse(text, mode="eval").body


# --- Reads test code without running it: which names are calls into the program, and whether the tests can judge a
# program.


LARGEST_TESTS = 1 << 20  # characters
HARNESS_NAMES = ("list_node", "tree_node", "is_same_list", "is_same_tree")
# Names that methods of ``Solution`` use without import: every public name of these modules, and the modules.
PRELUDE_MODULES = ("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
                   "itertools", "functools", "operator", "io", "sys", "json")  # fmt: skip
PRELUDE_NAMES = ("ListNode", "TreeNode", *PRELUDE_MODULES)
PACKAGES = ("numpy", "sympy", "mpmath")  # packages that tests may import besides the standard library
# Modules that tests may use as ``name.attribute`` without importing them.
_MODULES = {name: name for name in (
    "math", "cmath", "re", "json", "string", "random", "itertools", "functools", "collections", "operator", "heapq",
    "bisect", "copy", "datetime", "statistics", "decimal", "fractions", "typing", "time", "sys", "os", "unittest",
    "contextlib", "dataclasses", "numpy", "sympy",
)} | {"np": "numpy"}  # fmt: skip
# Other names that tests may use without importing them, where it is known that they are not the program's.
_NAMES = {name: f"{module}:{name}" for module, names in {
    "collections": ("Counter", "defaultdict", "deque", "OrderedDict", "namedtuple"),
    "typing": ("Any", "Callable", "Dict", "Iterable", "Iterator", "List", "Optional", "Sequence", "Set", "Tuple", "Union"),
    "math": ("isclose", "inf", "nan", "pi", "sqrt", "floor", "ceil", "factorial", "gcd"),
    "fractions": ("Fraction",), "decimal": ("Decimal",), "copy": ("deepcopy",), "functools": ("reduce", "partial"),
    "itertools": ("permutations", "combinations", "chain"),
}.items() for name in names}  # fmt: skip
_ENTRY = re.compile(r"[^\W\d]\w*(\(\))?(\.[^\W\d]\w*(\(\))?)*")
_SHOWN_NAMES = 5
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class UnusableTestsError(ValueError):
    """Tests that cannot judge any program; the message names the defect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestNames:
    """The meaning of the names in test code.

    >>> found = names_of("assert math.isclose(area(2), 12.566, rel_tol=1e-3)")
    >>> found.entry_point, sorted(found.remote), found.supplied
    ('area', ['area'], {'math': 'math'})
    """

    __test__ = False  # no test of pytest's

    entry_point: str  # the name that ``candidate`` means; empty when the tests call only ``remote`` names
    remote: frozenset[str]  # free names that are calls into the program
    aliases: frozenset[str]  # names of ``candidate``, also the one in ``check``
    supplied: dict[str, str]  # name to "module" or "module:attribute" of the library
    has_prelude: bool  # methods of ``Solution``: the common names are known without imports


@functools.lru_cache(maxsize=512)  # a task's tests come again with every completion
def names_of(tests: str, entry_point: str = "", preamble: str = "", names: tuple[str, ...] = ()) -> TestNames:
    """Determine the meaning of each name in the tests.

    Args:
        names: further names that the program defines and the tests may use.

    Raises:
        UnusableTestsError: the tests are no Python, have no test, never call the program or use an undefined name.
    """
    tree, before = parsed(tests, "the tests"), parsed(completed(preamble), "the preamble")
    why = _why_nothing_is_tested(tree) or _why_not_importable([*before.body, *tree.body])
    if why:
        raise UnusableTestsError(why)
    entry_point = entry_point or _given_to_check(tree)
    if entry_point and not _ENTRY.fullmatch(entry_point):
        raise UnusableTestsError(f"entry_point {entry_point!r} is no function and no Class().method")
    has_prelude = "Solution(" in entry_point + tests
    defined, used = _module_names(tests)
    before_defined, before_used = _module_names(completed(preamble)) if preamble else (set(), set())
    aliases = frozenset({"candidate", *_parameters_of_check(tree)})
    known = defined | before_defined | set(dir(builtins)) | set(HARNESS_NAMES) | {"__name__", "__file__", "__doc__"}
    free = (used - known - set(names) - aliases) | ({entry_root(entry_point)} & used - defined)
    supplied = {name: _MODULES[name] for name in (free | before_used) - known & _MODULES.keys()
                if name != entry_root(entry_point) and _only_of_attributes(name, [tree, before])}  # fmt: skip
    if has_prelude:
        free = {name for name in free if not in_prelude(name) or name == entry_root(entry_point)}
    free -= supplied.keys()
    if not entry_point and (free - _NAMES.keys() or not names):
        entry_point = _only_free_name(free)
    root = entry_root(entry_point)
    remote = {name for name in names if name not in defined}
    if root and root not in defined and not (hasattr(builtins, root) and aliases & _loaded(tree)):
        remote.add(root)
    free -= {root}
    supplied |= {name: _NAMES[name] for name in (free | (before_used - known)) & _NAMES.keys() if name not in remote}
    unknown = sorted(free - supplied.keys())
    if unknown:
        raise UnusableTestsError(
            f"the tests use {_listed(unknown)}, not defined anywhere: import the name there, or list the name under `names` of the "
            "row's tests if the program defines it"
        )
    called = _loaded(tree) & (remote | (aliases if root else frozenset()))
    if not called:
        raise UnusableTestsError(
            "the tests never call the program" if root else "candidate is not defined: give an entry_point"
        )
    if not root and aliases & _loaded(tree):
        raise UnusableTestsError("candidate is not defined: give an entry_point")
    return TestNames(
        entry_point=entry_point,
        remote=frozenset(remote),
        aliases=aliases if root else frozenset(),
        supplied=supplied,
        has_prelude=has_prelude,
    )


def defined_by(program: str, tests: str) -> tuple[str, ...]:
    """Names that the tests use and do not define, and that a reference solution defines: functions and classes.

    >>> defined_by("import math\\nclass Pair: pass\\ndef f(p): pass", "assert f(Pair()) == math.pi")
    ('Pair', 'f')
    """
    try:
        defined, used = _module_names(tests)
        body = parsed_module(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    made = {node.name for node in body if isinstance(node, (*_Function, ast.ClassDef))}
    return tuple(sorted((used - defined) & made - {"candidate", "check"}))


def entry_root(entry_point: str) -> str:
    """The first name of an entry point.

    >>> entry_root("Solution().f")
    'Solution'
    """
    return entry_point.partition(".")[0].removesuffix("()")


def completed(preamble: str) -> str:
    """A prompt that ends in the head of a function, with a body."""
    try:
        parsed_module(preamble)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return preamble.rstrip() + "\n    pass\n"
    return preamble


@functools.lru_cache(maxsize=64)
def parsed(text: str, what: str = "the tests") -> ast.Module:
    """The syntax tree; raises ``UnusableTestsError``."""
    if len(text) > LARGEST_TESTS:
        raise UnusableTestsError(f"{what} have more than {LARGEST_TESTS} characters")
    try:
        compile(text, "<tests>", "exec", dont_inherit=True)  # finds also what only the compiler does
        return parsed_module(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnusableTestsError(f"{what} are no Python: {error}") from None


@functools.lru_cache(maxsize=256)
def in_prelude(name: str) -> bool:
    """Whether methods of ``Solution`` know a name without an import."""
    return name in PRELUDE_NAMES or any(hasattr(__import__(module), name) for module in PRELUDE_MODULES)


# -- what is tested -------------------------------------------------------------------------------------------------


def checks(node: ast.AST) -> bool:
    """Whether a statement itself can fail a program, by an assert or a raise.

    >>> [checks(ast.parse(text)) for text in ("assert f(1)", "assert True", "self.assertEqual(f(1), 2)", "print(f(1))")]
    [True, False, True, False]
    """
    return any(_is_check(inner) for inner in ast.walk(node))


def _is_check(node: ast.AST) -> bool:
    match node:
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
        case ast.Assert() | ast.Raise():
            return True
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name.startswith("assert")
    return False


def checking_functions(tree: ast.Module) -> frozenset[str]:
    """Names of functions and methods of the tests that assert, or call one that does."""
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    called = [(node.name, called_in(node)) for node in functions]
    found = {node.name for node in functions if checks(node)}
    while more := {name for name, names in called if names & found} - found:
        found |= more
    return frozenset(found)


def called_in(node: ast.AST) -> set[str]:
    """Names that are called or handed on in a statement: functions and attributes."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)} | {
        inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)
    }


def _why_nothing_is_tested(tree: ast.Module) -> str:
    if not checks(tree):
        return "the tests have no assert"
    definitions = [node for node in tree.body if isinstance(node, (*_Function, ast.ClassDef))]
    rest = [node for node in tree.body if node not in definitions]
    if any(checks(node) for node in rest):
        return ""
    checking = checking_functions(tree)
    run = {node.name for node in definitions if node.name == "check" or is_test_function(node)}
    if checking & run.union(*map(called_in, rest)) or any(is_test_case(node) and checks(node) for node in definitions):
        return ""
    unfit = [node.name for node in definitions if isinstance(node, _Function) and node.name.startswith("test")]
    if unfit:
        return f"{_listed(unfit)} takes arguments, and is never called"
    return "the functions that assert are never called"


def is_test_function(node: ast.AST) -> bool:
    """``def test_...():`` that can be called without arguments, as pytest would."""
    return (
        isinstance(node, ast.FunctionDef)
        and node.name.startswith("test")
        and len(node.args.args) + len(node.args.posonlyargs) == len(node.args.defaults)
        and not any(default is None for default in node.args.kw_defaults)
    )


def is_test_case(node: ast.AST) -> bool:
    """A class of ``unittest``."""
    return isinstance(node, ast.ClassDef) and any(
        ast.unparse(base).rpartition(".")[2] == "TestCase" for base in node.bases
    )


def is_main(node: ast.stmt) -> bool:
    """``if __name__ == "__main__":``"""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _why_not_importable(statements: Sequence[ast.stmt]) -> str:
    for node in (inner for statement in statements for inner in ast.walk(statement)):
        modules: Iterable[str] = ()
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""] if not node.level else [""]
        for module in modules:
            first = module.partition(".")[0]
            if first not in sys.stdlib_module_names and first not in PACKAGES:
                return f"the tests import {module or 'a relative module'}; there are the standard library, {', '.join(PACKAGES)}"
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module not in _MODULES.values():
            return f"the tests import every name of {node.module}: name those that they use"
    return ""


# -- names ----------------------------------------------------------------------------------------------------------


def _given_to_check(tree: ast.Module) -> str:
    """The arguments that the tests pass to ``check``."""
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id="check"), args=[argument, *_])):
                given = ast.unparse(argument)
                return "" if given == "candidate" else given
    return ""


def _parameters_of_check(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args:
            yield node.args.args[0].arg


def _module_names(text: str) -> tuple[set[str], set[str]]:
    """Names bound by the module, and names looked up in the module or among the built-in ones."""
    try:
        top = symtable.symtable(text, "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # what only the compiler finds
        raise UnusableTestsError(f"the tests are no Python: {error}") from None
    bound: set[str] = set()
    used: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            name = symbol.get_name()
            if table is top:
                if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                    bound.add(name)
                if symbol.is_referenced():
                    used.add(name)
            elif symbol.is_global():
                (bound if symbol.is_declared_global() and symbol.is_assigned() else used).add(name)
    for node in ast.walk(parsed_module(text)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module in _MODULES.values():
            bound |= _public(node.module)
    return bound, used


@functools.lru_cache(maxsize=32)
def _public(module: str) -> frozenset[str]:
    if module in PACKAGES:
        return frozenset()
    loaded = __import__(module)
    return frozenset(getattr(loaded, "__all__", None) or (name for name in vars(loaded) if not name.startswith("_")))


def _loaded(tree: ast.Module) -> frozenset[str]:
    return frozenset(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )


def _only_of_attributes(name: str, trees: Sequence[ast.Module]) -> bool:
    """Whether every use of a name is ``name.attribute``."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in nodes)
    owned = sum(isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name for node in nodes)  # fmt: skip
    return uses == owned


def _only_free_name(free: set[str]) -> str:
    """The entry point of tests that name no entry point elsewhere; empty if unknown."""
    unknown = sorted(free - _NAMES.keys()) or sorted(free)
    if len(unknown) > 1:
        raise UnusableTestsError(
            f"the tests use {_listed(unknown)}, not defined anywhere: give an entry_point, and list under `names` of the "
            "row's tests the other names that the program defines"
        )
    return unknown[0] if unknown else ""


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return (
        " and ".join(names)
        if len(names) == 2
        else ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
    )
