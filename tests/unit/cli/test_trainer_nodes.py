"""A trainer over several nodes: the processes of each node, the commands of node 0 for the others, and inconsistent
settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.plan import commands_for_other_nodes, plan
from services.cli.run.launch import find
from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

TREE: dict[str, Any] = {
    "name": "spread",
    "policies": {
        "model0": {
            "model": {"path": "some/Qwen3-8B"},
            "trainer": {
                "nodes": [0, 2], "num_ranks": 8, "gpus": [4, 5, 6, 7], "rendezvous_port": 29541, "interface": "eth1",
            },
        }
    },
    "inference": {"a": {"engine": "sglang", "gpus": [0, 1, 2, 3]}, "b": {"engine": "sglang", "node": 2, "gpus": [0], "port": 9}},
    "data": {"train": {"path": "tasks.jsonl"}},
    "evaluation": {"at_start": False, "at_end": False},
}  # fmt: skip


def recipe(tmp_path: Path, *settings: str, environment: dict[str, str] | None = None) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(TREE))
    return load_recipe(path, settings, environment or {})


def test_each_node_starts_its_share_of_the_ranks(tmp_path: Path) -> None:
    loaded = recipe(tmp_path)
    assert loaded.nodes() == [0, 2]
    first = {spec.name: spec for spec in plan(loaded, Path("run"))}["trainer-model0"]
    second = {spec.name: spec for spec in plan(loaded, Path("run"), node=2)}["trainer-model0-node2"]
    for spec, rank in ((first, 0), (second, 1)):
        assert {"--num-ranks=4", "--num-nodes=2", f"--node-rank={rank}", "--interface=eth1"} <= set(spec.argv)
        assert "--rendezvous-port=29541" in spec.argv
        assert spec.env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert "--rendezvous-host=127.0.0.1" in first.argv
    assert [spec.name for spec in plan(loaded, Path("run"), node=2)] == ["inference-b", "trainer-model0-node2"]


def test_another_node_meets_the_ranks_of_node_0_where_it_finds_it(tmp_path: Path) -> None:
    loaded, there = recipe(tmp_path), {"ORCHESTRATOR_HOST_EXTERNAL": "node0.example"}
    started = find(loaded, "trainer-model0-node2", None, there)
    assert (started.node, started.shared) == (2, True)
    assert "--rendezvous-host=node0.example" in started.process.argv
    assert started.orchestrator == f"node0.example:{loaded.orchestrator.port}"
    with pytest.raises(ConfigError, match=r"trainer-model0-node2 runs on node 2 and must know where node 0 is"):
        find(loaded, "trainer-model0-node2", None, {})
    with pytest.raises(ConfigError, match=r"no process 'trainer-model0-node1'; write one of .*trainer-model0-node2"):
        find(loaded, "trainer-model0-node1", None, there)


def test_node_0_prints_the_command_of_each_share(tmp_path: Path) -> None:
    (tmp_path / "nodes" / "2").mkdir(parents=True)  # the bundle
    lines = commands_for_other_nodes(recipe(tmp_path, "run.id=r"), tmp_path, {"NODE_HOST": "node0.example"})
    assert any(
        "ROLLMILL_KEYS=runs/r-node2/keys/trainer rollmill start runs/r-node2 trainer-model0-node2" in line
        for line in lines
    )


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("nodes=[1, 2]", r"trainer\.nodes is \[1, 2\]: the first rank, which publishes, is on node 0"),
        ("nodes=[0, 2, 2]", r"write 0 first and no node twice"),
        ("nodes=[0, 2, 3]", r"num_ranks is 8, which 3 nodes .* write a multiple of 3"),
        ("rendezvous_port=0", r"rendezvous_port is 0, a free port, which other nodes cannot know"),
        ("interface=''", r"interface is missing: .* unencrypted, so name the network interface of a private network"),
        ("gpus=[4, 5]", r"2 GPUs on each of 2 nodes for 8 ranks.*trainer\.num_ranks: 4, or 4 GPUs"),
        ("gpus=[0, 1, 2, 3]", r"both take GPU 0 of node 0"),
    ],
)
def test_what_does_not_add_up_is_refused_with_what_to_write(tmp_path: Path, setting: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        recipe(tmp_path, f"policies.model0.trainer.{setting}")
