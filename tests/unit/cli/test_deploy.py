"""``millrace deploy``: the files follow from the recipe, pass their own checks, and start what the recipe has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from services.cli.deploy.command import deploy
from services.cli.deploy.layout import lay_out
from services.common.config.loading import load_recipe, load_resolved
from services.common.errors import ConfigError
from tests import needs

REPOSITORY = Path(__file__).resolve().parents[3]
QUICKSTART = REPOSITORY / "recipes" / "quickstart"
TWO_NODES = REPOSITORY / "recipes" / "code-multi-agent" / "qwen3-8b-codegen-verifier-m2po-full-2node"
TIER_0 = "envgateway.sandbox.allow_tier_0=true"
FIXED_PORTS = {"orchestrator.port": 50050, "envgateway.port": 50080}
ONE_NODE = sorted(
    file.parent for file in (REPOSITORY / "recipes").glob("**/recipe.yaml") if "2node" not in file.parent.name
)


def program(name: str) -> str:
    needs.check(name)
    return str(needs.installed(name))


@pytest.fixture
def compose(tmp_path: Path) -> dict[str, Any]:
    deploy(QUICKSTART, "compose", tmp_path, [TIER_0])
    services: dict[str, Any] = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    return services


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_committed_compose_files_are_what_deploy_writes_for_the_quickstart(tmp_path: Path, name: str) -> None:
    place = REPOSITORY / "deploy"
    deploy(QUICKSTART, "compose", tmp_path, [TIER_0])
    written = (tmp_path / name).read_text().replace(os.path.relpath(REPOSITORY, tmp_path), "..")
    assert (place / name).read_text() == written, (
        f"run: millrace deploy recipes/quickstart --target compose --set {TIER_0} -o deploy"
    )


def test_variables_of_this_machine_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lay_out(QUICKSTART)
    monkeypatch.setenv("ORCHESTRATOR_PORT", "61000")
    assert lay_out(QUICKSTART) == plain


def test_every_open_port_gets_a_number_that_no_other_has() -> None:
    ports = lay_out(QUICKSTART, ["orchestrator.port=50061"]).ports
    assert ports["ORCHESTRATOR_PORT"] == "50061" and "0" not in ports.values()
    assert len(set(ports.values())) == len(ports)


def test_there_is_a_container_for_every_process_and_none_is_reached_from_outside(compose: dict[str, Any]) -> None:
    processes = {spec.name for spec in lay_out(QUICKSTART).processes(0)}
    assert set(compose) == processes | {"node", "warm-start"}
    assert not any("ports" in service for service in compose.values())
    assert {compose[name]["network_mode"] for name in processes} == {"service:node"}
    assert all(service["cap_drop"] == ["ALL"] for service in compose.values())


def test_the_gateway_sees_neither_the_run_nor_the_weights(compose: dict[str, Any]) -> None:
    gateway = compose["envgateway"]
    assert not {"volumes", "ipc", "pid"} & set(gateway)
    assert {compose[name]["ipc"] for name in ("inference-a", "trainer-model0")} == {"service:node"}


def test_each_is_checked_where_it_answers(compose: dict[str, Any]) -> None:
    ports = lay_out(QUICKSTART).ports
    assert compose["trainer-model0"]["healthcheck"]["test"][-1] == f"127.0.0.1:{ports['TRAINER_MODEL0_PORT']}"
    assert compose["envgateway"]["healthcheck"]["test"][-1] == f"127.0.0.1:{ports['ENVGATEWAY_PORT']}"


def test_without_isolation_only_when_somebody_says_so(tmp_path: Path) -> None:
    deploy(QUICKSTART, "compose", tmp_path)
    assert "allow_tier_0" not in (tmp_path / "compose.yaml").read_text()


def test_a_dollar_sign_reaches_the_process(tmp_path: Path) -> None:
    deploy(QUICKSTART, "compose", tmp_path, ["name=a$b"])
    assert "name=a$$b" in (tmp_path / "compose.yaml").read_text()


def test_datasets_of_the_machine_are_mounted_and_named(tmp_path: Path) -> None:
    recipe = next(path for path in ONE_NODE if lay_out(path).needs_data())
    deploy(recipe, "compose", tmp_path)
    service = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]["orchestrator"]
    assert service["environment"]["MILLRACE_DATA_ROOT"] == "/data"
    assert any(volume.endswith(":/data:ro") for volume in service["volumes"])


def test_inference_services_have_the_image_of_their_engine(tmp_path: Path, compose: dict[str, Any]) -> None:
    assert compose["inference-a"]["image"] == "millrace-inference"
    deploy(QUICKSTART, "compose", tmp_path, ["inference.a.engine=sglang"])
    services = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    assert services["inference-a"]["image"] == "millrace-inference-sglang"
    assert services["inference-a"]["build"]["dockerfile"] == "deploy/docker/inference-sglang.Dockerfile"
    assert (REPOSITORY / services["inference-a"]["build"]["dockerfile"]).is_file()
    assert services["trainer-model0"]["image"] == "millrace-trainer"


def test_a_recipe_over_two_nodes_has_no_compose_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--target scripts"):
        deploy(TWO_NODES, "compose", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", ["security.tls=on", "orchestrator.host=0.0.0.0"])
def test_a_recipe_with_keys_has_no_compose_file(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match="a compose file has no keys"):
        deploy(QUICKSTART, "compose", tmp_path, [setting])
    assert not list(tmp_path.iterdir())


def test_a_recipe_outside_the_checkout_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"extends: {QUICKSTART / 'recipe.yaml'}\nname: mine\n")
    with pytest.raises(ConfigError, match="put it there"):
        deploy(file, "compose", tmp_path)


@pytest.mark.needs("Compose schema")
def test_compose_files_of_every_recipe_on_one_node_are_valid(tmp_path: Path) -> None:
    """By the schema of the Compose Specification, where somebody says where it lies."""
    schema = Path(os.environ["COMPOSE_SPEC_SCHEMA"])
    validator = jsonschema.Draft7Validator(yaml.safe_load(schema.read_text()))
    assert len(ONE_NODE) > 10
    for recipe in ONE_NODE:
        deploy(recipe, "compose", tmp_path)
        for name in ("compose.yaml", "compose.gpu.yaml"):
            validator.validate(yaml.safe_load((tmp_path / name).read_text()))


def test_each_node_has_its_scripts_and_they_pass_shellcheck(tmp_path: Path) -> None:
    paths = [*deploy(TWO_NODES, "scripts", tmp_path), *deploy(QUICKSTART, "scripts", tmp_path / "one", ["name=a 'b'"])]
    assert {path.name for path in paths if path.name.startswith("node1")} == {"node1.sh", "node1-inference-a.sh"}
    done = subprocess.run(
        [program("shellcheck"), *map(str, paths)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout


def stand_in(tmp_path: Path, body: str) -> dict[str, str]:
    """An environment whose PYTHON writes down what it was asked for, then does ``body`` for the process ``$5``."""
    fake = tmp_path / "python"
    fake.write_text(f'#!/usr/bin/env bash\necho "$5 $ORCHESTRATOR_PORT ${{*:6}}" >> "{tmp_path}/asked"\n{body}\n')
    fake.chmod(0o755)
    return {**os.environ, "PYTHON": str(fake), "MILLRACE_HOME": str(REPOSITORY)}


def run_node(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    deploy(QUICKSTART, "scripts", tmp_path, ["launch.stop_grace_s=0.2"])
    return subprocess.run(
        [str(tmp_path / "node0.sh"), "--profile", "tiny"],
        env=stand_in(tmp_path, body), capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip


def test_the_script_of_a_node_starts_its_processes_and_stops_the_gateway_when_the_run_is_over(tmp_path: Path) -> None:
    done = run_node(tmp_path, '[ "$5" != envgateway ] || exec sleep 60')
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {line.split()[0] for line in asked} == {spec.name for spec in lay_out(QUICKSTART).processes(0)}
    assert all(line.endswith("50050 --set launch.stop_grace_s=0.2 --profile tiny") for line in asked)


def test_a_process_that_fails_ends_its_node_with_its_code(tmp_path: Path) -> None:
    done = run_node(tmp_path, '[ "$5" = inference-a ] && exit 7\nexec sleep 60')
    assert done.returncode == 7 and "inference-a ended with 7" in done.stderr


@pytest.mark.slow
def test_the_warm_start_alone_makes_what_an_orchestrator_without_torch_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.cli", "start", "recipes/quickstart", "warm-start"]
    settings = ["warm_start.model0.steps=0", *(f"{name}={port}" for name, port in FIXED_PORTS.items())]
    command += [part for setting in settings for part in ("--set", setting)]
    environment = {**os.environ, "RUN_DIR": str(tmp_path / "mine")}
    checkpoint = tmp_path / "mine" / "warm_start" / "model0" / "config.json"
    seen = []
    for _ in range(2):
        done = subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        seen.append(checkpoint.stat().st_mtime_ns)
    assert seen[0] == seen[1], "the second time it was made again"
    assert load_resolved(tmp_path / "mine").run.id == "mine"


def test_the_layout_is_the_recipe() -> None:
    recipe = load_recipe(TWO_NODES, (), {})
    layout = lay_out(TWO_NODES)
    assert layout.nodes == [0, 1] and layout.recipe == recipe  # every port of it is a number already


def test_dockerfiles_pass_hadolint() -> None:
    files = sorted((REPOSITORY / "deploy" / "docker").glob("*.Dockerfile"))
    assert [file.stem for file in files] == ["envgateway", "inference-sglang", "inference", "orchestrator", "trainer"]
    done = subprocess.run(
        [program("hadolint"), *map(str, files)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_dockerfiles_are_alike_and_take_the_extra_of_their_service_only() -> None:
    alike = set()
    for service in ("envgateway", "inference", "orchestrator", "trainer"):
        file = REPOSITORY / "deploy" / "docker" / f"{service}.Dockerfile"
        lines = file.read_text().splitlines()
        assert f"ARG EXTRAS={service}" in lines and "USER 10001:10001" in lines
        alike.add(tuple(line for line in lines[2:] if not line.startswith(("ARG EXTRAS", "ENTRYPOINT", "    CMD ["))))
    assert len(alike) == 1, "what is changed in one Dockerfile is meant for all"


def pins(file: Path) -> dict[str, str]:
    return dict(line.split("==") for line in file.read_text().splitlines() if not line.startswith("#"))


def test_images_install_exact_versions_of_everything_the_services_name() -> None:
    pinned = pins(REPOSITORY / "deploy" / "docker" / "constraints.txt")
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        assert name not in pinned or pinned[name] == version
    assert {"torch", "transformers", "grpcio", "pyzmq", "aiohttp", "datasets"} <= set(pinned)


def test_the_image_with_sglang_has_its_pins_and_whatever_the_inference_service_names() -> None:
    """What the lock of the CPU environment takes from SGLang's metadata is the same here, but for torch."""
    pinned = pins(REPOSITORY / "deploy" / "docker" / "inference-sglang.constraints.txt")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *extras["inference"], *extras["sglang"]]:
        name, _, version = requirement.partition("==")
        name = re.split(r"[<>=\[ ]", name)[0]
        assert name in pinned and (not version or pinned[name] == version)
    lock = REPOSITORY / "services/inference/engine/sglang_cpu/requirements.txt"
    on_cpu = [line.split("#")[0].strip() for line in lock.read_text().splitlines() if "==" in line and line[0] != "#"]
    for line in on_cpu:
        name, _, version = line.partition("==")
        if name in ("sglang", "transformers", "tokenizers", "xgrammar", "openai", "compressed-tensors"):
            assert pinned[name] == version
