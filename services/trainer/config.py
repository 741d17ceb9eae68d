"""Command line and environment of one trainer rank. All other settings are in the recipe, which the orchestrator serves."""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DESCRIPTION = """\
The trainer of one policy: pulls batches, updates the model, publishes weight versions, writes checkpoints.
"""
EPILOG = """\
The trainer waits for an orchestrator that is not reachable, and logs the wait. After a kill at any moment, a new start
loads the newest checkpoint, trains the recorded batches again and continues.
Several ranks: python -m services.trainer.launch_ranks --num-ranks N --policy POLICY --orchestrator HOST:PORT
Exit codes: 0 the run ended or SIGTERM arrived, 1 an error that another start may resolve, 2 the recipe, the model or a
checkpoint cannot be used (the message says why), 75 another rank was lost (start all ranks again; they resume together).
"""

# The allocator's name since torch 2.9, and its name before, which people still set.
ALLOCATOR, EARLIER_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
RANKED = "--ranked"
# Of a rank in its group, and the options of torchrun itself.
_GROUP = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|PET)_\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One rank's arguments."""

    policy: str
    orchestrator: str
    run_dir: Path | None = None
    host: str | None = None
    ranked: bool = False


def parse(arguments: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policy", required=True, help="the policy to train, as the recipe names it")
    parser.add_argument("--orchestrator", required=True, metavar="HOST:PORT", help="the orchestrator's address")
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="directory of checkpoints and logs; default: the run directory that the orchestrator names",
    )
    parser.add_argument(
        "--host",
        help="bind address of the weight publisher, from which other machines fetch versions; overrides the recipe",
    )
    parser.add_argument(RANKED, action="store_true", help="the rank is that of torchrun's variables, for launch_ranks")
    return Settings(**vars(parser.parse_args(arguments)))


def set_defaults(environment: MutableMapping[str, str], *, ranked: bool = False) -> None:
    """Set missing variables, and unless ``ranked`` remove the ranks that another launcher set. Call before the import of torch.

    A job of Slurm or Kubernetes, or a torchrun around a command, leaves such variables, and they name another group. A
    network interface that this machine does not have goes too: no group could be joined, not even that of one rank.

    Packed micro-batches differ in size, so blocks of a GPU's memory are cut into pieces that fit no later micro-batch.
    Expandable segments map free pages together instead; without a GPU the setting has no effect.
    """
    here = ("", *(name for _, name in socket.if_nameindex()))
    for name in () if ranked else list(environment):
        wanted = tuple(environment[name].lstrip("^=").split(",")) if name in INTERFACES else ""
        if _GROUP.fullmatch(name) or not any(one.startswith(wanted) for one in here):
            del environment[name]
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if EARLIER_ALLOCATOR not in environment:
        environment.setdefault(ALLOCATOR, "expandable_segments:True")
