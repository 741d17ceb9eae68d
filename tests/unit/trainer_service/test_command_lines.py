"""Command lines answer help, mistakes and checks without importing torch."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from services.common.system.child import START_AGAIN
from services.trainer.config import INTERFACES, parse, set_defaults
from services.trainer.launch_ranks import _cause
from services.trainer.ranks import PeerLostError, leave_on_signal, peer_loss
from tests.waiting import PROCESS_S, WAIT_S


@pytest.mark.parametrize("module", ["services.trainer", "services.trainer.warm_start", "services.trainer.launch_ranks"])
def test_help_teaches_without_importing_torch(module: str) -> None:
    code = (
        f"import runpy, sys; sys.argv = [{module!r}, '--help']\n"
        "try:\n"
        f"    runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as left:\n"
        "    assert left.code == 0\n"
        "heavy = {'torch', 'transformers', 'grpc'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: python -m services.trainer" in done.stdout


def test_a_missing_argument_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--policy", "p"])
    assert "--orchestrator" in capsys.readouterr().err


def test_segments_expand_unless_the_environment_says_something_else() -> None:
    environment: dict[str, str] = {}
    set_defaults(environment)
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        chosen = {name: "max_split_size_mb:128"}
        set_defaults(chosen)
        assert {key: value for key, value in chosen.items() if "ALLOC" in key} == {name: "max_split_size_mb:128"}


GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
         "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "PET_NNODES")  # fmt: skip


def test_the_rank_comes_from_our_launcher_and_not_from_a_job_around_it() -> None:
    others = dict.fromkeys(("SLURM_PROCID", "LOCAL_CACHE", "RANKING", "CUDA_VISIBLE_DEVICES"), "1")
    inherited = {**dict.fromkeys(GROUP, "3"), **others}
    set_defaults(inherited)
    assert {name for name in inherited if name in GROUP} == set() and inherited.items() >= others.items()
    of_torchrun = {**dict.fromkeys(GROUP, "3"), **others}
    set_defaults(of_torchrun, ranked=True)
    assert of_torchrun.items() >= {**dict.fromkeys(GROUP, "3"), **others}.items()


@pytest.mark.parametrize(
    ("given", "kept"),
    [("lo", True), ("absent0,lo", True), ("l", True), ("=lo", True), ("^lo", True), ("absent0", False), ("^absent0,absent1", False)],
)  # fmt: skip
def test_an_interface_that_this_machine_does_not_have_is_not_waited_for(given: str, kept: bool) -> None:
    environment = {"GLOO_SOCKET_IFNAME": given, "NCCL_SOCKET_IFNAME": given}
    set_defaults(environment)
    assert [name in environment for name in INTERFACES] == [kept, kept]


# -- Which of several failures explains the others.


def failed(*exit_codes: int) -> Any:
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=rank) for rank, code in enumerate(exit_codes)}
    return SimpleNamespace(failures=failures)


@pytest.mark.parametrize(
    ("exit_codes", "cause"),
    [
        ((START_AGAIN, -signal.SIGKILL), -signal.SIGKILL),  # rank 0 only heard of it
        ((-signal.SIGTERM, START_AGAIN, 2), 2),  # torchrun ended rank 0, rank 2 refused its recipe
        ((-signal.SIGTERM, START_AGAIN), START_AGAIN),
        ((1, 2), 1),  # the first
    ],
)
def test_the_rank_that_failed_by_itself_explains_the_others(exit_codes: tuple[int, ...], cause: int) -> None:
    assert _cause(failed(*exit_codes)) == cause


def test_the_loss_of_a_peer_is_distinguished_from_other_errors() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
    lost = peer_loss(RuntimeError(gloo))
    assert lost is not None and "Connection closed by peer" in lost.message
    assert peer_loss(DistNetworkError("The client socket has timed out")) is not None
    kept = PeerLostError("the ranks of another node were told to leave")
    assert peer_loss(kept) is kept
    assert peer_loss(RuntimeError("CUDA out of memory")) is None
    assert peer_loss(RuntimeError("gloo: unsupported dtype")) is None


# -- A rank leaves on a signal, also while its main thread is inside a call that runs no Python.


def stuck_in_c(pipe: Connection) -> None:
    """A mutex that is locked twice: the main thread waits in C and no signal interrupts it, as in a collective."""
    leave_on_signal(lambda: pipe.send("leave"))
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    pipe.send("waiting")
    libc.pthread_mutex_lock(mutex)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_rank_whose_main_thread_runs_no_python_is_told_to_leave() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=stuck_in_c, args=(theirs,))
    process.start()
    try:
        assert ours.poll(WAIT_S) and ours.recv() == "waiting"
        process.terminate()
        assert ours.poll(WAIT_S) and ours.recv() == "leave", "at once, while the main thread is in C"
    finally:
        process.kill()
        process.join(WAIT_S)
