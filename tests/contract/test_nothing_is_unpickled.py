"""No file and no socket is read in a way that executes its content: the test reads the source of every service.

Calls are found in the syntax tree. The allowed imports are named below, with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ("services", "extras", "recipes", "deploy", "protos")

FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "torch.distributed.checkpoint",
}
# Sockets of multiprocessing unpickle what they receive; its pools and queues are not used by services either.
FORBIDDEN_MODULES |= {"multiprocessing", "concurrent.futures.process", "torch.multiprocessing"}
FORBIDDEN_CALLS = {
    "torch.load", "numpy.load", "np.load", "pandas.read_pickle", "pd.read_pickle", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "dist.all_gather_object", "dist.broadcast_object_list", "dist.gather_object", "dist.scatter_object_list",
    "dist.recv_object_list",
}  # fmt: skip
FORBIDDEN_METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
}
FORBIDDEN_ARGUMENTS = {"allow_pickle": True, "trust_remote_code": True, "weights_only": False, "use_safetensors": False}


# It writes handles of tensors for the service's own child engine, whose interface asks for them, and reads none.
WRITERS = {
    "extras/sglang/tensors.py": [
        "imports multiprocessing.reduction",
        "imports multiprocessing.reduction.ForkingPickler",
        "imports torch.multiprocessing",
        "imports torch.multiprocessing",
        "imports torch.multiprocessing.reductions",
    ]
}


def sources() -> list[Path]:
    found = (path for place in PLACES for path in (ROOT / place).rglob("*.py"))
    return sorted(path for path in found if "tests" not in path.parts[len(ROOT.parts) :])


def findings(tree: ast.AST) -> Iterator[str]:
    """Calls in a file that could execute their input, with the line."""
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for module in modules:
            if any(module == bad or module.startswith(f"{bad}.") for bad in FORBIDDEN_MODULES):
                yield f"{node.lineno}: imports {module}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS or called.rpartition(".")[2] in FORBIDDEN_METHODS:
                yield f"{node.lineno}: calls {called}"
            loads = called.startswith("AutoModel") and called.endswith("from_pretrained")
            if loads and "use_safetensors" not in {keyword.arg for keyword in node.keywords}:
                yield f"{node.lineno}: calls {called} without use_safetensors=True"
            for keyword in node.keywords:
                wanted = FORBIDDEN_ARGUMENTS.get(keyword.arg or "")
                if wanted is not None and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is not wanted
                ):
                    yield f"{node.lineno}: passes {keyword.arg}={ast.unparse(keyword.value)}"


def test_no_service_reads_what_could_run_code() -> None:
    found = {
        str(path.relative_to(ROOT)): told for path in sources() if (told := list(findings(ast.parse(path.read_text()))))
    }
    written = {path: [told.partition(": ")[2] for told in found.pop(path, [])] for path in WRITERS}
    assert found == {}
    assert written == WRITERS
