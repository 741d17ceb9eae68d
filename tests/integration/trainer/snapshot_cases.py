"""One rank of the snapshot tests: writes versions of a seeded model, and reports the result of each case.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m tests.integration.trainer.snapshot_cases OUT_DIR
    CASE...

Every rank runs the cases in order and writes ``OUT_DIR/rank<R>.json``. The model's shapes are such that neither two nor
three ranks divide them, and with three a rank has empty shards.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.common.errors import RollmillError
from services.common.system.child import run_and_leave
from services.trainer import publish
from services.trainer.model.policy_model import PolicyModel, build_policy_model
from services.trainer.publish import Snapshots
from services.trainer.ranks import Ranks, init_ranks, leave_ranks

RUN, POLICY = "run-1", "model0"
FORMS = {"bfloat16": "xxh3-128", "float32": "blake3"}  # published type and digest, tried together


def uneven_model(ranks: Ranks, *, tied: bool = True) -> PolicyModel:
    """Dimensions 0 of 31, 10, 7, 16, 8 and 4 rows."""
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=31,
        hidden_size=10,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=7,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    return build_policy_model(Qwen3ForCausalLM(config), ranks)


def snapshots(model: PolicyModel, ranks: Ranks, directories: list[Path], dtype: str = "bfloat16") -> Snapshots:
    return Snapshots(
        model,
        ranks,
        run_id=RUN,
        policy=POLICY,
        dtype=dtype,
        algorithm=FORMS[dtype],  # type: ignore[arg-type]
        directories=directories,
    )


def write(case: str, ranks: Ranks, out_dir: Path) -> dict[str, Any]:
    """One case; returns the observations of this rank."""
    directory = out_dir / case
    if ranks.is_first:
        directory.mkdir()
    model = uneven_model(ranks, tied="untied" not in case)
    if case == "several_hosts":
        with mock.patch.object(publish, "host_identity", return_value=f"host {ranks.rank}"):
            made = snapshots(model, ranks, [directory])
        assert not made.is_one_host
        made.write(1)
        return {}
    if case == "no_room":
        return _told(lambda: snapshots(model, ranks, [out_dir / "nowhere", out_dir / "nowhere either"]).write(1))
    if case == "unmappable":  # the last rank cannot see the file
        made = snapshots(model, ranks, [directory])
        if ranks.rank == ranks.world_size - 1:
            with mock.patch.object(publish.SnapshotWriter, "join", side_effect=OSError("not to be seen from here")):
                told = _told(lambda: made.write(1))
        else:
            told = _told(lambda: made.write(1))
        made.write(2)  # nobody is out of step afterwards
        return told
    if case == "stuck":  # until killed: the last rank never finishes its rows
        made = snapshots(model, ranks, [directory])
        if ranks.rank == ranks.world_size - 1:
            with mock.patch.object(made, "_copy_own_rows", _never):
                made.write(1)
        made.write(1)
    for version, dtype in enumerate(FORMS, start=1):
        written = snapshots(model, ranks, [directory], dtype).write(version)
        assert (written is not None) == ranks.is_first
    return {}


def _told(work: Any) -> dict[str, Any]:
    began = time.monotonic()
    try:
        work()
    except RollmillError as error:
        return {"error": type(error).__name__, "message": error.message, "seconds": time.monotonic() - began}
    return {}


def _never(*_: object) -> None:
    time.sleep(120)


def run(out_dir: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    ranks = init_ranks(timeout_s=60.0, device="cpu")
    results = {case: write(case, ranks, out_dir) for case in cases}
    (out_dir / f"rank{ranks.rank}.json").write_text(json.dumps(results))
    leave_ranks()


def main() -> int:
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), sys.argv[2:])
    return 0


if __name__ == "__main__":
    run_and_leave(main)
