"""Every name that services define is used by services, recipes, examples or the package of users, and every setting is read.

A name counts as used where another line of code has it, whatever object it belongs to. So the test finds what is left over
after a change, and not every line that cannot be reached.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "services" / "common" / "config"
USERS = ("services", "extras", "recipes", "examples", "rollmill")
WORD = re.compile(r"[A-Za-z_]\w*")
NAME_OR_PATH = re.compile(r"[\w.:/-]+")

CALLED_BY_LIBRARIES = {
    "add_registered_method_handlers", "intercept_service",  # grpc
    "connection_lost", "connection_made", "data_received",  # asyncio
    "emit",  # logging
    "ignore_aliases",  # PyYAML
    "assign_req_to_token_pool_cpu",  # SGLang
    "init_transfer_engine",  # vLLM
    "visit_ExceptHandler", "visit_With",  # ast
}  # fmt: skip
# Read by tests and benchmarks, because no other name shows the same.
SEEN_BY_TESTS = {
    "LOSS_CLASSES", "boxed_integer", "from_offsets", "host_arrays", "num_transfers",
}  # fmt: skip
CHECKS = REPOSITORY / "services" / "cli" / "check"
READ_BY_CHECKS = {"gpu_memory_gib"}  # settings that no running process needs
FOR_USERS = {"converse", "respond", "Tool"}  # part of the users' API; their callers are outside this repository


@cache
def trees() -> dict[Path, ast.Module]:
    """The parsed files of ``USERS``, without the modules generated from protos."""
    paths = (
        path for folder in USERS for path in (REPOSITORY / folder).rglob("*.py") if not {"pb", "tests"} & {*path.parts}
    )
    return {path: ast.parse(path.read_text()) for path in paths}


@cache
def uses() -> Counter[str]:
    """How often each name is read, and each keyword given; names in short strings count, such as import paths."""
    found: Counter[str] = Counter()
    for tree in trees().values():
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                    found[name] += 1
                case ast.Constant(value=str(text)) if len(text) < 200 and NAME_OR_PATH.fullmatch(text):
                    found.update(WORD.findall(text))
    return found


def definitions(node: ast.AST, *, in_class: bool = False) -> Iterator[str]:
    """Names of functions without a decorator of a library, of classes, constants and enum members."""
    for inner in getattr(node, "body", []):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            if all(isinstance(one, ast.Name) for one in inner.decorator_list):
                yield inner.name
        elif isinstance(inner, ast.ClassDef):
            yield inner.name
            yield from definitions(inner, in_class=True)
        elif isinstance(inner, ast.Assign) and not in_class:
            yield from (target.id for target in inner.targets if isinstance(target, ast.Name))
        elif isinstance(inner, ast.AnnAssign) and not in_class and isinstance(inner.target, ast.Name):
            yield inner.target.id


def settings() -> Iterator[tuple[str, str]]:
    """(class, name) of every field of the recipe."""
    for path, tree in trees().items():
        if path.is_relative_to(CONFIG):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    fields = (inner.target for inner in node.body if isinstance(inner, ast.AnnAssign))
                    yield from ((node.name, target.id) for target in fields if isinstance(target, ast.Name))


def test_every_name_of_services_is_used() -> None:
    allowed = CALLED_BY_LIBRARIES | SEEN_BY_TESTS | FOR_USERS
    unused = {
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path, tree in trees().items()
        if path.is_relative_to(REPOSITORY / "services")
        for name in definitions(tree)
        if not uses()[name] and name not in allowed and not name.startswith("__")
    }
    assert unused == set(), "delete them, or say in this file who calls them"


def test_every_setting_of_a_recipe_is_read() -> None:
    """Where it has an effect: validation and the estimates of `rollmill check` are no consumer."""
    read: Counter[str] = Counter()
    for path, tree in trees().items():
        outside = not path.is_relative_to(CONFIG)
        estimated = path.is_relative_to(CHECKS)
        for node in ast.walk(tree):
            # Sections read their own fields to check them; other modules use properties and methods of a section.
            if isinstance(node, ast.FunctionDef) and not outside and is_validator(node):
                read.subtract(inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read[node.attr] += not estimated or node.attr in READ_BY_CHECKS
    found = list(settings())
    assert len(found) > 200
    assert [f"{section}.{name}" for section, name in found if read[name] <= 0 and name != "model_config"] == []


def is_validator(node: ast.FunctionDef) -> bool:
    return any("validator" in ast.unparse(decorator) for decorator in node.decorator_list)
