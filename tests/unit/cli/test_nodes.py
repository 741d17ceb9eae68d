"""Runs over two nodes: what is printed for the other node, and what starts there, and only with a name for node 0."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.nodes import commands_for_other_nodes, needs_tunnel, tunnel
from services.cli.start import find
from services.common.config.loading import load_recipe
from services.common.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
TWO_NODES = "recipes/code-multi-agent/qwen3-8b-codegen-verifier-m2po-full-2node"
NODE_0 = "ORCHESTRATOR_HOST_EXTERNAL"


def two_nodes(*settings: str) -> tuple[Path, tuple[str, ...]]:
    return REPOSITORY / TWO_NODES, settings


def test_node_0_prints_the_whole_command_for_node_1() -> None:
    path, settings = two_nodes("run.steps=7", "name=a b")
    recipe = load_recipe(path, settings, {"ORCHESTRATOR_PORT": "51000"})
    told, line = commands_for_other_nodes(recipe, path, settings, {})
    assert "node 1" in told
    assert shlex.split(line) == [
        f"{NODE_0}={socket.gethostname()}", "ORCHESTRATOR_PORT=51000", "deploy/launch/1_inference_a.sh", str(path),
        "--set", "run.steps=7", "--set", "name=a b",
    ]  # fmt: skip


def test_the_name_of_node_0_may_be_given() -> None:
    path, settings = two_nodes()
    _, line = commands_for_other_nodes(load_recipe(path, settings, {}), path, settings, {NODE_0: "login-1"})
    assert line.split()[0] == f"{NODE_0}=login-1"


def test_a_recipe_on_one_node_prints_nothing() -> None:
    path = REPOSITORY / "recipes/quickstart"
    assert commands_for_other_nodes(load_recipe(path, (), {}), path, (), {}) == []


def test_the_process_of_node_1_goes_through_a_tunnel_that_carries_every_port_it_dials() -> None:
    path, settings = two_nodes()
    found = find(load_recipe(path, settings, {}), "inference-a", None, {NODE_0: "node0.example"})
    assert found.tunnel is not None
    argv = list(found.tunnel.argv)
    assert argv[0] == "ssh" and argv[-1] == "node0.example" and "ExitOnForwardFailure=yes" in argv
    forwarded = [argv[n + 1] for n, part in enumerate(argv) if part == "-L"]
    assert forwarded == [f"127.0.0.1:{port}:127.0.0.1:{port}" for port in (50050, 50080, 19861, 19862)]
    assert found.orchestrator == found.tunnel.address == "127.0.0.1:50050"
    assert found.process.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_on_node_0_there_is_no_tunnel() -> None:
    path, settings = two_nodes()
    recipe = load_recipe(path, settings, {})
    for process in ("inference-b", "trainer-model0", "trainer-model1"):
        assert find(recipe, process, None, {}).tunnel is None
    assert not needs_tunnel("127.0.0.1") and not needs_tunnel(socket.gethostname()) and needs_tunnel("node0.example")


def test_a_process_of_node_1_without_a_name_for_node_0_is_refused() -> None:
    path, settings = two_nodes()
    with pytest.raises(ConfigError, match=rf"inference-a runs on node 1 .* set {NODE_0}"):
        find(load_recipe(path, settings, {}), "inference-a", None, {})


def test_the_script_of_node_1_exits_at_once_with_the_explanation() -> None:
    environment = {name: value for name, value in os.environ.items() if name != NODE_0}
    done = subprocess.run(
        ["deploy/launch/1_inference_a.sh", TWO_NODES],
        cwd=REPOSITORY,
        env={**environment, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert f"set {NODE_0} to the host name of the node that runs the orchestrator" in done.stderr


def test_a_free_port_is_refused_in_a_split_launch() -> None:
    path, settings = two_nodes()
    recipe = load_recipe(path, settings, {"WEIGHTS_PORT_MODEL1": "0"})
    with pytest.raises(ConfigError, match=r"policies\.model1\.weights\.port is 0"):
        tunnel(recipe, "node0.example")
    with pytest.raises(ConfigError, match=r"orchestrator\.port is 0"):
        find(load_recipe(REPOSITORY / "recipes/quickstart", (), {}), "inference-a", None, {})


@pytest.mark.parametrize("process", ["inference-c", "trainer-model7", "inference", "nobody"])
def test_an_unknown_process_lists_those_there_are(process: str) -> None:
    path, settings = two_nodes()
    with pytest.raises(ConfigError, match="write one of orchestrator, envgateway, inference-b, trainer-model0"):
        find(load_recipe(path, settings, {}), process, None, {NODE_0: "x"})
