"""A whole run over TLS: ``rollmill run`` makes the keys, every process has its own, and outsiders get nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from services.common.security.keys import load
from tests.e2e.conftest import Run
from tests.keys import make_keys

pytestmark = pytest.mark.slow

Rollmill = Callable[..., tuple[int, str]]


def test_a_run_over_tls_is_watched_and_ended_by_those_who_may_and_by_nobody_else(
    start_run: Callable[..., Run], rollmill: Rollmill, tmp_path: Path
) -> None:
    run = start_run("secure", "run.steps=1000", "security.tls=on")
    run.wait_for(run.steps, "the first training step")
    address = ("--orchestrator", run.address_of("orchestrator"))
    assert rollmill("status", run.directory)[0] == 0
    assert rollmill("pause", run.directory)[0] == 0  # the commands that follow have the machine for themselves
    assert rollmill("status", *address, keys=run.directory / "keys" / "viewer")[0] == 0
    refused = {
        "stop": rollmill("stop", *address, keys=run.directory / "keys" / "viewer"),
        "without keys": rollmill("status", *address),
        "another run's": rollmill("status", *address, keys=make_keys(tmp_path / "other").folder),
    }
    assert all(code == 2 for code, _ in refused.values()), refused
    words = {name: " ".join(output.split()) for name, (_, output) in refused.items()}
    assert "role viewer may not call" in words["stop"]
    assert "speaks TLS, and this process has no keys" in words["without keys"]
    assert "did not sign" in words["another run's"]
    assert rollmill("resume", run.directory)[0] == 0
    run.kill("inference-a")  # it comes back with its keys
    step = run.steps()
    run.wait_for(lambda: run.steps() > step + 3, "steps after the replica was killed")
    assert rollmill("stop", run.directory)[0] == 0
    run.finish()
    assert_no_secret_is_outside(run.directory)


def assert_no_secret_is_outside(run_dir: Path) -> None:
    bundles = [load(path.parent) for path in (run_dir / "keys").rglob("cert.pem")]
    assert len(bundles) >= 9
    secrets = [secret for b in bundles for secret in (b.token.encode(), b.key.splitlines()[1])]
    for path in run_dir.rglob("*"):
        if (
            path.is_file()
            and run_dir / "keys" not in path.parents
            and path.suffix in (".json", ".jsonl", ".zst", ".yaml", ".stderr")
        ):
            with zstandard.open(path) if path.suffix == ".zst" else path.open("rb") as file:
                written = file.read()
            assert not any(secret in written for secret in secrets), path
