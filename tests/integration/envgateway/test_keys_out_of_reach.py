"""A program that the policy wrote finds no keys: neither their place, nor their content.

At tier 0 programs are limited, but not isolated from the gateway: there only the variable is kept from them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.security import identity
from services.common.security.keys import VARIABLE, Role
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest
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


async def test_no_program_finds_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    said = result.stdout.decode()
    assert VARIABLE not in said.splitlines()[0]
    if pool.tier != "0":
        assert VARIABLE not in said and "read " not in said and "seen " not in said
        assert said.count("refused") >= 20
        secrets = [who.bundle.token[-40:], who.bundle.key.decode().splitlines()[1]]
        assert not any(secret in said for secret in secrets)
