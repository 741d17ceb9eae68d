"""The cases of the checkpoint tests for each rank; started by ``launching.fork_ranks``. The first rank writes its
observations.

python -m tests.integration.trainer.checkpoint_cases DIR {write,read}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from services.common.checkpoints import checkpoints_in, is_set_aside
from services.common.errors import ModelMismatchError
from services.common.system.child import run_and_leave
from services.common.weights.snapshot import tensor_digest
from services.trainer.checkpoints import CheckpointFailedError, Checkpoints, moments_of, weights_of
from services.trainer.ranks import Ranks, full, init_ranks, leave_ranks
from services.trainer.step import TrainStep
from tests.unit.trainer.building import algorithm, rank_batch, tiny_causal_lm, train_step, training_sequences

IDENTITY = ("r", "p")
GAE = {"advantage": "gae", "value_head": {"lr": 0.05}}


def make(ranks: Ranks, *, seed: int = 0, offload: bool = False, compute: torch.dtype | None = None) -> TrainStep:
    """A tied model with a value head; weights of 3 and of 2 rows that no number of ranks divides evenly."""
    return train_step(
        algorithm("m2po", **GAE),
        causal_lm=tiny_causal_lm(seed=seed),
        ranks=ranks,
        max_tokens=96,
        offload=offload,
        compute_dtype=compute,
    )


def train(step: TrainStep, ranks: Ranks, number: int) -> None:
    step.run(rank_batch(training_sequences(8, seed=number, minibatches=2), ranks.rank, ranks.world_size))


def checkpoints(directory: Path, ranks: Ranks, identity: tuple[str, str] = IDENTITY) -> Checkpoints:
    return Checkpoints(directory, *identity, 3, ranks)


def digests(step: TrainStep) -> dict[str, str]:
    """Of every whole weight and moment, the same however they are sharded. A collective."""
    tensors = {**weights_of(step.model), **moments_of(step.model, step.optimizer)}
    return {name: tensor_digest(full(t).cpu().contiguous().reshape(-1).numpy()) for name, t in tensors.items()}


def write(directory: Path, ranks: Ranks) -> dict[str, object]:
    """Read the checkpoint of one rank, go on, save twice; then the newest is damaged, and all go back together."""
    step = make(ranks, seed=4)
    begun = checkpoints(directory / "one", ranks).restore(step.model, step.optimizer)
    seen: dict[str, object] = {"begun": begun, "of_one": digests(step), "updates": step.optimizer.num_updates}
    own = checkpoints(directory / "many", ranks)
    for number in (2, 3):
        train(step, ranks, number)
        torch.manual_seed(100 * number + ranks.rank)
        own.begin(number, step.model, step.optimizer)
        own.finish()
        seen[f"saved_{number}"] = digests(step)
    damaged = own.path(3) / "optimizer_00001.safetensors"
    if not ranks.is_first:  # one rank alone sees it first
        damaged.write_bytes(damaged.read_bytes()[:-1])
    dist.barrier()
    other = make(ranks, seed=5, offload=True)
    again = checkpoints(directory / "many", ranks)
    seen["fell_back_to"] = again.restore(other.model, other.optimizer)
    seen["restored"] = digests(other)
    seen["set_aside"] = [path.name for _, path in checkpoints_in(directory / "many") if is_set_aside(path)]
    seen["random"] = torch.equal(
        torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(200 + ranks.rank))
    )
    try:
        checkpoints(directory / "many", ranks, ("x", "p")).restore(other.model, other.optimizer)
    except ModelMismatchError as error:
        seen["refused"] = error.message
    seen["failed"] = failed_save(directory, ranks, step)
    return seen


def failed_save(directory: Path, ranks: Ranks, step: TrainStep) -> str:
    """One rank's disk is full; every rank gets the error, and no file remains."""
    own, written = checkpoints(directory / "many", ranks), os.write

    def full_disk(fd: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    if not ranks.is_first:
        os.write = full_disk  # type: ignore[assignment]
    try:
        own.save(9, step.model, step.optimizer)
    except CheckpointFailedError as error:
        return error.message
    finally:
        os.write = written
    return ""


def read(directory: Path, ranks: Ranks) -> dict[str, object]:
    """The checkpoint of two ranks, in mixed precision and with moments on the host."""
    step = make(ranks, seed=6, offload=True, compute=torch.bfloat16)
    begun = checkpoints(directory / "many", ranks).restore(step.model, step.optimizer)
    seen: dict[str, object] = {"begun": begun, "read": digests(step)}
    checkpoints(directory / "more", ranks).save(2, step.model, step.optimizer)
    return seen


def main() -> int:
    directory, what = Path(sys.argv[1]), sys.argv[2]
    ranks = init_ranks(timeout_s=60.0, device="cpu")
    seen = write(directory, ranks) if what == "write" else read(directory, ranks)
    (directory / f"{what}_{ranks.rank}.json").write_text(json.dumps(seen))
    leave_ranks()
    return 0


if __name__ == "__main__":
    run_and_leave(main)
