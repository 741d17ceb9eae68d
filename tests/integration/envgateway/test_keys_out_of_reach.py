"""A program that the policy wrote finds no keys: neither their place, nor their content.

At tier 0 programs are limited, but not isolated from the gateway: there only the variable is kept from them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.security import identity
from services.common.security.keys import VARIABLE, Role
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest
from tests import needs
from tests.integration.envgateway.conftest import CONFIG
from tests.keys import make_keys

LOOK = """
import os, sys
print(sorted(os.environ))
for root, folders, files in os.walk({folder!r}, onerror=lambda error: print("closed", type(error).__name__)):
    print("seen", files)
for name in {files!r}:
    try:
        print("read", open(name, "rb").read())
    except OSError as error:
        print("refused", type(error).__name__)
for pid in [{gateway}, os.getppid(), "self"]:
    try:
        print("environment", open(f"/proc/{{pid}}/environ", "rb").read())
    except OSError as error:
        print("refused", type(error).__name__)
"""


async def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, list[str]]:
    """The tier, the output of a program that searched for keys, and the secrets."""
    import os

    keys = make_keys(tmp_path / "keys")
    monkeypatch.setenv(VARIABLE, str(keys.folder))
    pool = SandboxPool.start_before_threads(CONFIG)
    who = identity.load(keys.folder, Role.ENVGATEWAY)
    try:
        files = [str(path) for path in keys.folder.rglob("*") if path.is_file()]
        code = LOOK.format(folder=str(keys.folder), files=files, gateway=os.getpid())
        result = await pool.run(ExecutionRequest(code=code))
    finally:
        await pool.close()
    assert result.status is RunStatus.OK, result.stderr
    secrets = [who.bundle.token[-40:], who.bundle.key.decode().splitlines()[1]]
    return pool.tier, result.stdout.decode(), secrets


async def test_no_program_can_find_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, said, _ = await looked(tmp_path, monkeypatch)
    assert VARIABLE not in said.splitlines()[0]
    if tier != "0":
        assert VARIABLE not in said


async def test_an_isolated_program_reads_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, said, secrets = await looked(tmp_path, monkeypatch)
    if tier == "0":
        needs.unmet("isolating sandbox", "the sandbox runs at tier 0")
    assert "read " not in said and "seen " not in said
    assert said.count("refused") >= 20
    assert not any(secret in said for secret in secrets)
