"""Mutants of reference solutions: one operator, comparison or constant changed, by seed.

Whether a mutant counts is found without the judge: one program runs the reference and the mutant side by side on the
arguments of the tests and says whether any answer differs. A mutant that differs nowhere is no wrong program.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import random
from collections.abc import Callable
from dataclasses import replace

from services.envgateway.judge.records import AssertTests, JudgeRequest
from services.envgateway.sandbox.bare import harness, plain
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def mutants(request: JudgeRequest, rng: random.Random, count: int) -> list[JudgeRequest]:
    """Up to ``count`` different mutants of a request's program."""
    tree = ast.parse(request.code)
    places = len(_changes(tree))
    made: dict[str, JudgeRequest] = {}
    for place in rng.sample(range(places), min(places, 4 * count)):
        changed = copy.deepcopy(tree)
        _changes(changed)[place](rng)
        code = ast.unparse(changed)
        if code != ast.unparse(tree):
            made.setdefault(code, replace(request, code=code))
    return list(made.values())[:count]


def _changes(tree: ast.Module) -> list[Callable[[random.Random], None]]:
    found: list[Callable[[random.Random], None]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in _SWAPS:
            found.append(lambda _, node=node: setattr(node, "op", _SWAPS[type(node.op)]()))
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
            found.append(lambda _, node=node: node.ops.__setitem__(0, _SWAPS[type(node.ops[0])]()))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            found.append(lambda rng, node=node: setattr(node, "value", node.value + rng.choice([-1, 1])))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            found.append(lambda _, node=node: setattr(node, "value", not node.value))
    return found


_SIDE_BY_SIDE = """
task = json.load(sys.stdin)
def load(code):
    names = {"__name__": "solution"}
    harness.fill(names)
    exec(compile(code, "<solution>", "exec"), names)
    return names
def answer(names, case):
    entry, args, kwargs = case
    args, kwargs = (plain.from_tree(part) for part in (args, kwargs))
    try:
        return eval(entry, names)(*args, **kwargs)
    except Exception as error:
        return ("raised", type(error))
reference, mutant = (load(task[name]) for name in ("reference", "mutant"))
def plainly(tree):
    if not isinstance(tree, list) or tree[0] in ("i", "f", "c", "b"):
        return plain.from_tree(tree)
    parts = [plainly(part) for part in tree[1:]]
    if tree[0] == "d":
        parts = list(zip(parts[::2], parts[1::2]))
    return tree[0], sorted(parts, key=repr) if tree[0] in ("s", "z", "d") else parts
different = False
for case in task["cases"]:
    a, b = answer(reference, case), answer(mutant, case)
    different = different or plainly(json.loads(plain.encode(a))) != plainly(json.loads(plain.encode(b)))
print("different" if different else "same")
"""


async def counts(pool: SandboxPool, reference: JudgeRequest, mutant: JudgeRequest) -> bool | None:
    """Whether a mutant answers differently for some arguments; None when the tests' arguments cannot be read."""
    assert isinstance(reference.tests, AssertTests)
    cases = reference.tests.calls()
    if cases is None:
        return None
    task = {
        "reference": reference.code,
        "mutant": mutant.code,
        "cases": [[case.entry_point, case.args, case.kwargs] for case in cases],
    }
    result = await pool.run(
        ExecutionRequest(
            code=_library() + _SIDE_BY_SIDE, stdin=json.dumps(task).encode(), limits=ExecutionLimits(cpu_s=1.0)
        )
    )
    # otherwise: another answer, an error while loading, a loop without end
    return result.status is not RunStatus.OK or not result.stdout.endswith(b"same\n")


def _library() -> str:
    """The tree form and the prelude as text: the sandbox has no path to our modules."""
    text = "import copy, json, sys, types\n"
    for module in (plain, harness):
        name = module.__name__.rpartition(".")[2]
        source = "\n".join(line for line in inspect.getsource(module).split("\n") if not line.startswith("from ."))
        text += (
            f"{name} = types.ModuleType({name!r})\n"
            f"{name}.__dict__.update(plain=globals().get('plain'))\n"
            f"exec(compile({source!r}, {name!r}, 'exec'), {name}.__dict__)\n"
        )
    return text
