"""Snapshots by several ranks, as real processes: the bytes of one rank, and failures that all ranks hear alike."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from services.cli.run.processes import ForkServer
from services.common.system.processes import ChildProcess
from services.common.weights.snapshot import Snapshot, named_weights, sweep_orphans, tensor_digest
from services.trainer.ranks import Ranks
from tests.integration.trainer.launching import fork_ranks, made_once, run_processes
from tests.integration.trainer.snapshot_cases import FORMS, snapshots, uneven_model
from tests.waiting import wait_until

MODULE = "tests.integration.trainer.snapshot_cases"
WAIT_S = 120.0
CASES = ["tied", "untied", "several_hosts", "no_room", "unmappable"]


@pytest.fixture(scope="module", params=[3])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: ForkServer
) -> tuple[Path, list[Any]]:
    """The files of all cases, and the report of each rank."""

    def write(directory: Path) -> None:
        arguments, logs = [str(directory), *CASES], directory / "logs"
        run_processes(fork_ranks(forks, MODULE, arguments, request.param, logs), logs)

    out_dir = made_once(tmp_path_factory, f"snapshots_of_{request.param}", write)
    return out_dir, [json.loads((out_dir / f"rank{rank}.json").read_text()) for rank in range(request.param)]


def only(directory: Path, pattern: str = "*") -> Path:
    [path] = directory.glob(pattern)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tied", "untied", "several_hosts"])
def test_several_ranks_write_the_bytes_of_one(case: str, written: tuple[Path, list[Any]], tmp_path: Path) -> None:
    model = uneven_model(Ranks.single(), tied=case != "untied")
    for version, dtype in enumerate(FORMS, start=1):
        if case == "several_hosts" and version > 1:
            break
        alone = snapshots(model, Ranks.single(), [tmp_path], dtype).write(version)
        assert alone is not None
        together = Snapshot(only(written[0] / case, f"rollmill.*.{version}.*.weights"))
        assert together.manifest == alone.manifest
        assert together.data == Snapshot(alone.path).data
        assert together.manifest.digest.startswith(f"{FORMS[dtype]}:")
        assert ("lm_head.weight" in {entry.name for entry in alone.manifest.tensors}) == (case == "untied")
    assert not list((written[0] / case).glob(".*")), "no draft is left"


@pytest.mark.slow
def test_without_room_every_rank_hears_the_same_and_at_once(written: tuple[Path, list[Any]]) -> None:
    told = [rank["no_room"] for rank in written[1]]
    assert {one["error"] for one in told} == {"SnapshotSpaceError"}
    assert len({one["message"] for one in told}) == 1
    assert "no room for version 1" in told[0]["message"]
    assert all(str(written[0] / name) in told[0]["message"] for name in ("nowhere", "nowhere either"))
    assert all(one["seconds"] < 30 for one in told), "nobody waited for a deadline"


@pytest.mark.slow
def test_a_rank_that_cannot_write_its_part_fails_all_and_the_next_version_is_written(
    written: tuple[Path, list[Any]],
) -> None:
    told = [rank["unmappable"] for rank in written[1]]
    last = len(told) - 1
    assert {(one["error"], one["message"]) for one in told} == {
        ("InfrastructureError", f"writing version 1: rank {last}: not to be seen from here")
    }
    assert Snapshot(only(written[0] / "unmappable")).manifest.version == 2
    assert not list((written[0] / "unmappable").glob(".*")), "the draft of version 1 is gone"


@pytest.mark.slow
def test_an_interrupted_write_is_never_seen_and_is_swept_when_its_last_writer_is_gone(
    tmp_path: Path, forks: ForkServer
) -> None:
    first, last = fork_ranks(forks, MODULE, [str(tmp_path), "stuck"], 2, tmp_path / "logs")
    directory = tmp_path / "stuck"
    try:
        wait_until(lambda: len(list(directory.glob(".*.weights"))) == 1, "a draft")
        draft = only(directory, ".*")
        wait_until(lambda: num_open(draft) == 2, "both ranks at work on it")
        end(first)
        assert sweep_orphans([directory]) == [], "another writer still has it"
        end(last)
        assert not list(directory.glob("rollmill.*")), "half a version has no name that is read"
        assert sweep_orphans([directory]) == [draft]
        assert not list(directory.iterdir())
    finally:
        for process in (first, last):
            end(process)


def test_one_rank_casts_from_the_master_weights_and_copies(tmp_path: Path) -> None:
    model = uneven_model(Ranks.single())
    written = snapshots(model, Ranks.single(), [tmp_path]).write(3)
    assert written is not None
    with torch.no_grad():
        expected = {n: w.to(torch.bfloat16).view(torch.int16) for n, w in named_weights(model.causal_lm).items()}
        for parameter in model.parameters():
            parameter.zero_()
    snapshot = Snapshot(written.path)
    assert [entry.name for entry in snapshot.manifest.tensors] == sorted(expected)
    for entry in snapshot.manifest.tensors:
        assert entry.digest == tensor_digest(expected[entry.name].numpy())
        assert snapshot.bits(entry).tobytes() == expected[entry.name].numpy().tobytes()
    assert min(written.copy_s, written.digest_s) > 0


def end(process: ChildProcess) -> None:
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait(WAIT_S)


def num_open(path: Path) -> int:
    """How many processes have the file open."""
    inode = path.stat().st_ino
    found = 0
    for fds in Path("/proc").glob("[0-9]*/fd"):
        try:
            found += any(os.stat(fd).st_ino == inode for fd in fds.iterdir())
        except OSError:  # it ended, or is not ours
            continue
    return found
