"""Each RPC of the protos is called by the product: one that only a test or a person calls is a door without a use."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks._hostile import all_rpcs


def test_each_rpc_has_a_caller_in_the_product(repository: Path) -> None:
    folders = [repository / "services", repository / "rollmill"]
    paths = [path for folder in folders for path in folder.rglob("*.py") if "pb" not in path.parent.parts[-1:]]
    text = "\n".join(path.read_text() for path in paths)
    called = set(re.findall(r"(?<!def )\.(\w+)(?:\(|, |$)", text, flags=re.MULTILINE))
    assert {rpc.name for rpc in all_rpcs()} <= called
