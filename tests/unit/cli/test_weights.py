"""``rollmill weights``: reports of replicas in readable form."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.inspect.standing import read_transfers, show, summarise
from services.common.errors import ConfigError
from services.common.records import WeightTransfer
from services.common.telemetry.metrics import MetricsWriter

DELTA = WeightTransfer(
    policy="model0",
    version=3,
    base_version=2,
    encoding="delta",
    transport="bulk",
    sources=("127.0.0.1:9", "127.0.0.1:8"),
    payload_size_bytes=1000,
    full_size_bytes=200_000,
    num_changes=1000,
    started_at=1000.5,
    encode_s=0.25,
    fetch_s=0.5,
    verify_s=0.125,
    write_s=0.0625,
    pause_s=0.03125,
)
FULL = WeightTransfer(
    policy="model0", version=2, encoding="full", transport="mapped", payload_size_bytes=200_000,
    full_size_bytes=200_000, num_changes=100_000, started_at=900.0, fetch_s=1.0, verify_s=0.5, write_s=0.0, pause_s=0.1,
)  # fmt: skip
FAILED = WeightTransfer(policy="model0", version=4, base_version=3, started_at=1100.0, error="the stream ended early")


def _run(directory: Path, transfers: list[tuple[str, WeightTransfer]]) -> Path:
    writer = MetricsWriter(directory / "metrics" / "orchestrator.jsonl")
    writer.write("training_step", policy="model0", step=1)
    for replica, transfer in transfers:
        writer.write("weight_transfer", replica=replica, **asdict(transfer))
    writer.close()
    return directory


def test_transfers_are_summed_up_by_policy_and_replica(tmp_path: Path) -> None:
    run = _run(tmp_path, [("a", DELTA), ("a", FULL), ("a", FAILED), ("b", FULL)])
    first, second = summarise(read_transfers(run))
    assert (first["replica"], first["num_full"], first["num_delta"], first["num_failed"]) == ("a", 1, 1, 1)
    assert first["bytes"] == 201_000 and first["saved_bytes"] == 199_000
    assert first["bits_per_change"] == pytest.approx(8.0)
    assert first["fetch_s"] == pytest.approx(0.75), "the median over what arrived"
    assert (second["replica"], second["num_delta"], second["bits_per_change"]) == ("b", 0, None)


def test_what_is_shown_names_mode_source_bits_stages_and_failures(tmp_path: Path) -> None:
    out = io.StringIO()
    show(read_transfers(_run(tmp_path, [("a", DELTA), ("a", FAILED)])), Console(file=out, width=220), last=5)
    text = out.getvalue()
    for wanted in (
        "delta bulk",
        "127.0.0.1:9",
        "2 → 3",
        "8.0",
        "250.0 ms",
        "31.2 ms",
        "the stream ended early",
    ):
        assert wanted in text, wanted


def test_a_filter_that_matches_nothing_says_what_there_is(tmp_path: Path) -> None:
    run = _run(tmp_path, [("a", DELTA)])
    with pytest.raises(ConfigError, match="model0 at a"):
        read_transfers(run, policy="other")
