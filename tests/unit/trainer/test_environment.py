from __future__ import annotations

import pytest

from services.trainer.config import INTERFACES, set_defaults


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
