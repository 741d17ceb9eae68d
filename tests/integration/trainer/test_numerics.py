"""Ranks that share a model refuse a batch alike, and name the same cause."""

from __future__ import annotations

from pathlib import Path

from services.cli.run.processes import ForkServer
from services.common.tiny import build
from tests.integration.trainer.launching import fork_ranks, run_processes


def test_all_ranks_refuse_with_the_same_cause_and_tokens(forks: ForkServer, tmp_path: Path) -> None:
    build(tmp_path / "model", seed=3)
    arguments = [str(tmp_path / "model"), str(tmp_path)]
    run_processes(
        fork_ranks(forks, "tests.integration.trainer.numerics_case", arguments, 2, tmp_path / "logs"), tmp_path / "logs"
    )
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in range(2))
    assert first == second
    stale, temperature = first.split("\n")
    assert stale.startswith("stale: ") and "Likely cause: older weights (version 0" in stale
    assert temperature.startswith("temperature: ") and "Likely cause: temperature (1." in temperature
    assert "of step 1;" in temperature and "of step 3;" in stale and first.count(" then '") == 20
