"""Loading by shards: the bits of ``from_pretrained`` on any number of ranks, and no rank ever holds the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.cli.run.processes import ForkServer
from tests.integration.trainer.launching import fork_ranks, made_once, run_processes
from tests.integration.trainer.loading_cases import MIB, make_models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "models_to_load", lambda directory: make_models(directory / "models")) / "models"


@pytest.fixture(scope="module", params=[3])
def loaded(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory, forks: ForkServer
) -> list[Any]:
    """The report of each rank."""

    def load(directory: Path) -> None:
        module, arguments = "tests.integration.trainer.loading_cases", [str(directory), str(models)]
        run_processes(fork_ranks(forks, module, arguments, request.param, directory), directory)

    out_dir = made_once(tmp_path_factory, f"loaded_{request.param}", load)
    return [json.loads((out_dir / f"rank{rank}.json").read_text()) for rank in range(request.param)]


def test_every_rank_has_the_bits_of_from_pretrained(loaded: list[Any]) -> None:
    cases = [name for name in loaded[0] if name != "large"]
    assert len(cases) == 2 * 4 + 1
    for rank, said in enumerate(loaded):
        for case in cases:
            assert said[case] == dict.fromkeys(said[case], True), f"rank {rank}, {case}"


def test_no_rank_reads_or_holds_more_than_its_share(loaded: list[Any]) -> None:
    """The file is half as large as the weights in memory: bfloat16 there, float32 here."""
    told = [said["large"] for said in loaded]
    whole = sum(one["held"] for one in told)
    assert sum(one["read"] for one in told) == whole // 2, "each row is read once, by who holds it"
    for one in told:
        assert one["read"] == one["held"] // 2
        assert one["held"] <= whole / len(told) * 1.05 + MIB
        # Its rows, the same rows as they lie in the file (mapped), and room for one tensor on the way.
        assert one["peak"] <= 1.5 * one["held"] + 40 * MIB, f"{one}"
