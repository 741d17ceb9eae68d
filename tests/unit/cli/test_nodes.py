"""Runs over two nodes: the address of node 0, the commands for the other node, and its processes."""

from __future__ import annotations

import io
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from services.cli import plan as nodes
from services.cli.plan import (
    address_of_node_0,
    at_addresses_of,
    commands_for_other_nodes,
    gateway_host,
    listening_host,
    plan,
    ports_in_use,
    with_addresses,
    with_free_ports,
)
from services.cli.run import launch as start
from services.cli.run.launch import find
from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
TWO_NODES = "recipes/code-multi-agent/qwen3-8b-codegen-verifier-m2po-full-2node"
NODE_0 = "ORCHESTRATOR_HOST_EXTERNAL"
HERE = "192.0.2.17"  # what the tests say is this machine's address

NAMES = {"node0.example": [HERE], "elsewhere.example": ["192.0.2.99"], "host": ["127.0.1.1"], "::1": ["::1"]}


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine called host with a name that resolves to loopback only, and with one address."""
    monkeypatch.setattr(nodes, "_addresses", lambda name: NAMES.get(name, [name] if name[0].isdigit() else []))
    for module in (nodes, start):
        monkeypatch.setattr(module, "is_here", lambda host: host in (HERE, "127.0.0.1", "127.0.0.2", "node0.example"))
    monkeypatch.setattr(nodes, "_outward_address", lambda: HERE)
    monkeypatch.setattr(socket, "gethostname", lambda: "host")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run with a bundle for node 1."""
    (tmp_path / "my runs" / "mine" / "nodes" / "1").mkdir(parents=True)
    return tmp_path / "my runs" / "mine"


def two_nodes(*settings: str, **variables: str) -> Recipe:
    return load_recipe(REPOSITORY / TWO_NODES, ("run.id=mine", *settings), variables)


def test_node_0_listens_at_its_address_where_node_1_dials_and_nowhere_else() -> None:
    recipe = with_addresses(two_nodes(), {nodes.NODE_HOST: HERE})
    assert recipe.envgateway is not None
    assert (recipe.orchestrator.host, recipe.envgateway.host, recipe.inference["b"].host) == (HERE, HERE, HERE)
    assert recipe.policies["model0"].weights.host == HERE, "node 1 fetches its versions"
    assert recipe.inference["a"].host == "127.0.0.1", "node 1's own affair"
    assert recipe.digest_algorithm() == "blake3"


def test_a_recipe_on_one_node_stays_on_loopback_and_prints_nothing() -> None:
    recipe = load_recipe(REPOSITORY / "recipes/quickstart", (), {})
    assert with_addresses(recipe, {nodes.NODE_HOST: HERE}) is recipe
    assert commands_for_other_nodes(recipe, REPOSITORY, {}) == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({nodes.NODE_HOST: "node0.example"}, HERE), ({NODE_0: "node0.example"}, HERE), ({}, HERE)],
    ids=["NODE_HOST", NODE_0, "its own name leads to loopback, so the way out"],
)
def test_where_node_0_is(variables: dict[str, str], expected: str) -> None:
    assert address_of_node_0(variables) == expected


@pytest.mark.parametrize("name", ["elsewhere.example", "nobody.example", "localhost"])
def test_a_name_that_is_not_this_machines_is_refused(name: str) -> None:
    for find_host in (address_of_node_0, listening_host):
        with pytest.raises(
            ConfigError, match=rf"{nodes.NODE_HOST} is {name}, .* this machine that the other nodes reach"
        ):
            find_host({nodes.NODE_HOST: name})


def test_a_machine_without_a_way_out_asks_for_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_outward_address", lambda: None)
    with pytest.raises(ConfigError, match=f"host leads to no address .* set {nodes.NODE_HOST}"):
        address_of_node_0({})


def test_node_0_prints_a_line_that_copies_the_bundle_and_one_that_starts(run_dir: Path) -> None:
    recipe = with_addresses(two_nodes(), {})
    told, copy, start = commands_for_other_nodes(recipe, run_dir, {NODE_0: "node0.example"})
    assert "paste on node 1" in told
    here, _, there = copy.partition(" && ")
    assert here.strip() == "mkdir -p runs/mine-node1"
    ssh, _, unpacked = there.partition(" | ")
    assert unpacked == "tar -C runs/mine-node1 -xp"
    words = shlex.split(ssh)
    assert words[:2] == ["ssh", "node0.example"]
    # The shell of ssh reads it once more, so that directories with spaces survive both.
    assert shlex.split(" ".join(words[2:])) == ["tar", "-C", f"{run_dir}/nodes/1", "-ch", "."]
    assert start.split() == [
        f"{NODE_0}=node0.example", "ROLLMILL_KEYS=runs/mine-node1/keys/inference",
        "deploy/launch/1_inference_a.sh", "runs/mine-node1",
    ]  # fmt: skip


def test_processes_of_node_1_dial_node_0_and_are_reached_by_nobody() -> None:
    found = find(two_nodes(), "inference-a", None, {NODE_0: "login-1"})
    assert (found.node, found.orchestrator) == (1, "login-1:50050")
    argv = found.process.argv
    assert argv[argv.index("--orchestrator") + 1] == "login-1:50050" and argv[argv.index("--host") + 1] == "127.0.0.1"
    assert found.process.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_a_trainer_elsewhere_dials_node_0_and_publishes_at_its_own_address() -> None:
    environment = {NODE_0: "elsewhere.example", nodes.NODE_HOST: HERE}
    found = find(two_nodes(), "trainer-model1", None, environment)
    assert found.orchestrator == "elsewhere.example:50050"
    assert found.process.argv[found.process.argv.index("--host") + 1] == HERE


def test_a_process_of_node_1_without_a_name_for_node_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"inference-a runs on node 1 .* set {NODE_0}"):
        find(two_nodes(), "inference-a", None, {})


def test_the_gateway_of_node_1_is_started_there_listens_there_and_is_nobody_elses_affair(run_dir: Path) -> None:
    recipe = with_addresses(two_nodes("envgateway.node=1", "envgateway.port=0"), {nodes.NODE_HOST: HERE})
    assert "envgateway" not in {spec.name for spec in plan(recipe, run_dir, 0)}
    assert [spec.name for spec in plan(recipe, run_dir, 1)] == ["envgateway", "inference-a"]
    assert recipe.envgateway is not None and recipe.envgateway.host == "127.0.0.1"
    assert with_free_ports(recipe).envgateway == recipe.envgateway, "node 1 finds a port for itself"
    *_, start = commands_for_other_nodes(recipe, run_dir, {NODE_0: "node0.example"})
    assert "keys/envgateway deploy/launch/0_environment.sh runs/mine-node1 &" in start
    assert "keys/inference deploy/launch/1_inference_a.sh runs/mine-node1 &" in start
    found = find(recipe, "envgateway", None, {NODE_0: "elsewhere.example", nodes.NODE_HOST: HERE})
    assert (found.node, found.orchestrator) == (1, "elsewhere.example:50050")
    argv = found.process.argv
    assert argv[argv.index("--host") + 1] == HERE and argv[argv.index("--orchestrator") + 1] == found.orchestrator
    assert argv[argv.index("--run-dir") + 1] == str((Path("runs") / "mine-node1").resolve())


def test_a_gateway_elsewhere_listens_at_its_address_on_the_way_to_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_own_address", {"192.0.2.99": HERE}.get)
    assert gateway_host("elsewhere.example", {}) == HERE
    assert gateway_host("127.0.0.1", {}) == "127.0.0.1", "node 0 on the same machine"
    assert gateway_host("elsewhere.example", {nodes.NODE_HOST: "node0.example"}) == HERE, "as it is named"
    with pytest.raises(ConfigError, match=f"no address on the way to 192.0.2.1: set {nodes.NODE_HOST}"):
        gateway_host("192.0.2.1", {})


def test_a_free_port_is_refused_in_a_split_launch() -> None:
    with pytest.raises(ConfigError, match=r"orchestrator\.port is 0"):
        find(load_recipe(REPOSITORY / "recipes/quickstart", (), {}), "inference-a", None, {})


@pytest.mark.parametrize("process", ["inference-c", "trainer-model7", "inference", "nobody"])
def test_an_unknown_process_lists_those_there_are(process: str) -> None:
    with pytest.raises(ConfigError, match="write one of orchestrator, envgateway, inference-b, trainer-model0"):
        find(two_nodes(), process, None, {NODE_0: "x"})


def test_free_ports_are_those_of_the_addresses_where_services_listen() -> None:
    held = socket.create_server(("127.0.0.2", 0))
    taken = held.getsockname()[1]
    tree: dict[str, Any] = two_nodes().model_dump(mode="json")
    tree["orchestrator"] |= {"host": "127.0.0.2", "port": taken}
    with held:
        told = ports_in_use(Recipe.model_validate(tree))
    assert [line for line in told if line.startswith(f"orchestrator.port: port {taken} is in use")]
    tree["orchestrator"]["port"] = tree["inference"]["a"]["port"] = tree["inference"]["b"]["port"] = 0
    free = with_free_ports(Recipe.model_validate(tree))
    assert free.orchestrator.port and free.inference["b"].port
    assert free.inference["a"].port == 0, "node 1 finds one for itself"


@pytest.mark.parametrize(
    ("process", "options", "told"),
    [
        ("inference-b", {"alone": True}, "write envgateway instead of inference-b"),
        ("trainer-model0", {"replica": "x"}, "write inference-NAME, not trainer-model0"),
    ],
)
def test_environments_alone_and_replicas_more_are_of_their_services_only(
    tmp_path: Path, process: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        start.start(two_nodes(), process, tmp_path, Console(file=io.StringIO()), {}, **options)


def test_a_replica_more_has_its_name_in_the_pool_and_the_port_of_this_machine(tmp_path: Path) -> None:
    found = find(two_nodes(INFERENCE_A_PORT="0"), "inference-a", tmp_path, {NODE_0: "192.0.2.1"}, "a-7-1")
    argv = list(found.process.argv)
    assert argv[argv.index("--replica-id") + 1] == "a-7-1" and argv[argv.index("--port") + 1] == "0"
    assert found.orchestrator == "192.0.2.1:50050"


def test_a_run_that_goes_on_at_another_address_gets_it_and_keeps_all_else() -> None:
    before, now = (two_nodes(f"orchestrator.host=192.0.2.{number}") for number in (1, 9))
    moved = at_addresses_of(before, now)
    assert moved is not None and moved.orchestrator.host == "192.0.2.9"
    host = {"orchestrator": before.orchestrator.model_copy(update={"host": "192.0.2.9"})}
    assert moved == before.model_copy(update=host)
    assert at_addresses_of(moved, now) is None


# --- a trainer over several nodes

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


def spread(tmp_path: Path, *settings: str, environment: dict[str, str] | None = None) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(TREE))
    return load_recipe(path, settings, environment or {})


def test_each_node_starts_its_share_of_the_ranks(tmp_path: Path) -> None:
    loaded = spread(tmp_path)
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
    loaded, there = spread(tmp_path), {"ORCHESTRATOR_HOST_EXTERNAL": "node0.example"}
    started = find(loaded, "trainer-model0-node2", None, there)
    assert (started.node, started.shared) == (2, True)
    assert "--rendezvous-host=node0.example" in started.process.argv
    assert started.orchestrator == f"node0.example:{loaded.orchestrator.port}"
    with pytest.raises(ConfigError, match=r"trainer-model0-node2 runs on node 2 and must know where node 0 is"):
        find(loaded, "trainer-model0-node2", None, {})
    with pytest.raises(ConfigError, match=r"no process 'trainer-model0-node1'; write one of .*trainer-model0-node2"):
        find(loaded, "trainer-model0-node1", None, there)


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
        spread(tmp_path, f"policies.model0.trainer.{setting}")
