"""``rollmill deploy``: the files follow from the recipe, pass their own checks, and start the processes of the recipe."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from extras.deploy.command import write_deployment as deploy
from extras.deploy.files import lay_out
from extras.deploy.forwarder import MAX_CONNECTIONS, gateways, listen
from services.common.config.loading import load_recipe
from services.common.errors import ConfigError
from services.common.system.machine import LOOPBACK, free_ports
from tests import needs
from tests.documented import DOCS
from tests.metrics_catalogue import CATALOGUE, markdown_table, step_metrics
from tests.waiting import PROCESS_S, WAIT_S

REPOSITORY = Path(__file__).resolve().parents[3]
PROFILE = REPOSITORY / "deploy" / "docker" / "seccomp.json"
QUICKSTART = REPOSITORY / "recipes" / "quickstart"
TWO_NODES = REPOSITORY / "recipes" / "code-multi-agent" / "qwen3-8b-codegen-verifier-m2po-full-2node"
TIER_0 = "envgateway.sandbox.allow_tier_0=true"
RECIPES = REPOSITORY / "recipes"
ALFWORLD = RECIPES / "alfworld" / "qwen2.5-7b-instruct-m2po-full"
WEBSHOP = RECIPES / "webshop" / "qwen2.5-7b-instruct-m2po-full"
CODE = RECIPES / "code" / "qwen3-8b-m2po-full"
MATH = RECIPES / "math-multi-agent" / "qwen3-8b-single-agent-m2po-delta-deepscaler-data"
DOCKERFILES = sorted((REPOSITORY / "deploy" / "docker").glob("*.Dockerfile"))
ONE_NODE = sorted(
    file.parent for file in (REPOSITORY / "recipes").glob("**/recipe.yaml") if "2node" not in file.parent.name
)


def program(name: str) -> str:
    needs.check(name)
    return str(needs.installed(name))


def services_of(folder: Path, name: str = "compose.yaml") -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((folder / name).read_text())["services"]
    return services


@pytest.fixture
def compose(tmp_path: Path) -> dict[str, Any]:
    deploy(QUICKSTART, "compose", tmp_path, [TIER_0])
    return services_of(tmp_path)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_committed_compose_files_are_what_deploy_writes_for_the_quickstart(tmp_path: Path, name: str) -> None:
    deploy(QUICKSTART, "compose", tmp_path, [TIER_0])
    checkout = os.path.relpath(REPOSITORY, tmp_path)
    written = (tmp_path / name).read_text().replace(f"context: {checkout}", "context: .")
    written = written.replace(f"seccomp={checkout}/", "seccomp=./")
    assert (REPOSITORY / name).read_text() == written, (
        f"run: rollmill deploy recipes/quickstart --target compose --set {TIER_0} -o ."
    )


def test_no_container_has_capabilities_and_one_port_is_published_on_loopback(compose: dict[str, Any]) -> None:
    assert all(service["cap_drop"] == ["ALL"] for service in compose.values())
    assert [name for name, service in compose.items() if "ports" in service] == ["node"]
    assert compose["node"]["ports"] == ["127.0.0.1:${ORCHESTRATOR_PORT:-50050}:50050"]


def test_the_gateway_sees_neither_the_run_nor_the_weights(compose: dict[str, Any], tmp_path: Path) -> None:
    assert not {"volumes", "ipc", "pid"} & set(compose["envgateway"])
    assert not {"volumes", "ipc", "pid"} & set(services_of(tmp_path, "compose.gpu.yaml")["envgateway"])


@pytest.mark.parametrize("recipe", [QUICKSTART, WEBSHOP, TWO_NODES], ids=lambda path: path.name)
def test_the_gateway_has_a_profile_that_lets_its_sandbox_make_namespaces_and_no_other_container_has(
    recipe: Path, tmp_path: Path
) -> None:
    deploy(recipe, "compose", tmp_path)
    for file in tmp_path.glob("*compose.yaml"):
        for name, service in services_of(tmp_path, file.name).items():
            profiles = [
                part.removeprefix("seccomp=") for part in service["security_opt"] if part.startswith("seccomp=")
            ]
            assert len(profiles) == (name == "envgateway"), name
            assert all((tmp_path / path).resolve() == PROFILE for path in profiles)


def test_the_profile_is_one_of_docker_and_allows_no_more_than_its_default_and_namespaces() -> None:
    profile = json.loads(PROFILE.read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert {one["architecture"] for one in profile["archMap"]} == {"SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"}
    free = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("args")
        for name in rule["names"]
    }
    assert {
        "clone",
        "unshare",
        "mount",
        "umount2",
        "pivot_root",
        "setns",
        "landlock_restrict_self",
        "seccomp",
        "capset",
    } <= free
    assert not free & {"bpf", "keyctl", "add_key", "kexec_load", "init_module", "io_uring_setup", "userfaultfd", "reboot", "swapon",
                       "open_by_handle_at", "perf_event_open", "syslog", "chroot", "acct", "iopl", "settimeofday", "clone3"}  # fmt: skip


@pytest.mark.needs("libseccomp", "Linux")
def test_libseccomp_knows_every_name_of_the_profile_and_python_runs_under_it() -> None:
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from tests.no_namespaces import load_profile; print(load_profile({str(PROFILE)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PROCESS_S)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_without_isolation_only_when_somebody_says_so(tmp_path: Path) -> None:
    deploy(QUICKSTART, "compose", tmp_path)
    assert "allow_tier_0" not in (tmp_path / "compose.yaml").read_text()


def test_a_dollar_sign_reaches_the_process(tmp_path: Path) -> None:
    deploy(QUICKSTART, "compose", tmp_path, ["name=a$b"])
    assert "name=a$$b" in (tmp_path / "compose.yaml").read_text()


def test_datasets_that_no_hub_has_must_be_mounted_and_others_may(tmp_path: Path) -> None:
    for recipe, volume in ((CODE, "${ROLLMILL_DATA_ROOT:?"), (MATH, "${ROLLMILL_DATA_ROOT:-no-data}:/data:ro")):
        deploy(recipe, "compose", tmp_path)
        service = services_of(tmp_path)["orchestrator"]
        assert service["environment"]["ROLLMILL_DATA_ROOT"] == "/data"
        assert any(mount.startswith(volume) and mount.endswith(":/data:ro") for mount in service["volumes"])


@pytest.mark.parametrize("name", ["alfworld", "webshop"])
def test_the_gateway_has_the_engine_and_the_data_of_its_environment(tmp_path: Path, name: str) -> None:
    deploy(RECIPES / name / "qwen2.5-7b-instruct-m2po-full", "compose", tmp_path)
    services = services_of(tmp_path)
    gateway = services["envgateway"]
    assert gateway["image"] == f"rollmill-envgateway-{name}"
    assert f"EXTRAS=envgateway,{name}" in gateway["build"]["args"]
    (world,) = gateway["volumes"]  # one, whatever the recipe names in it
    assert (tmp_path / world["source"]).resolve() == REPOSITORY / "data" / name
    assert world["target"] == f"/app/data/{name}" and world["read_only"] and not world["bind"]["create_host_path"]
    assert services["trainer-model0"]["image"] == "rollmill-trainer"
    with pytest.raises(ConfigError, match=r"inference\.a\.engine is vllm, for which there is no image"):
        deploy(QUICKSTART, "compose", tmp_path, ["inference.a.engine=vllm"])


def test_a_world_outside_the_checkout_is_mounted_where_the_recipe_says(tmp_path: Path) -> None:
    deploy(ALFWORLD, "compose", tmp_path, ["envgateway.alfworld.data=/mnt/alfworld"])
    worlds = services_of(tmp_path)["envgateway"]["volumes"]
    assert ("/mnt/alfworld", "/mnt/alfworld") in [(world["source"], world["target"]) for world in worlds]


def test_a_profile_reaches_every_process_and_its_world_is_made_before_the_run(tmp_path: Path) -> None:
    deploy(ALFWORLD, "compose", tmp_path, [], "tiny")
    services = services_of(tmp_path)
    processes = {name for name in services if "RUN_DIR" in services[name].get("environment", {})}
    assert processes == {"worlds", "warm-start", "orchestrator", "envgateway", "inference-a", "trainer-model0"}
    for name in processes:
        assert services[name]["command"][-2:] == ["--profile", "tiny"]
        writable = "worlds:/runs/worlds" if name == "worlds" else "worlds:/runs/worlds:ro"
        assert "run.dir=/runs" in services[name]["command"] and writable in services[name]["volumes"]
    assert services["worlds"]["image"] == services["envgateway"]["image"]  # with the engine that makes them
    for name in ("warm-start", "envgateway"):
        assert services[name]["depends_on"]["worlds"] == {"condition": "service_completed_successfully"}
    assert services["inference-a"]["image"] == "rollmill-inference"  # not SGLang's
    assert not any(volume.startswith("runs:") for volume in services["envgateway"]["volumes"])


def test_two_nodes_have_a_file_each_and_every_container_the_keys_of_its_role(tmp_path: Path) -> None:
    paths = deploy(TWO_NODES, "compose", tmp_path)
    assert {path.name for path in paths} == {f"node{n}.compose{gpu}.yaml" for n in (0, 1) for gpu in ("", ".gpu")}
    nodes = [services_of(tmp_path, f"node{number}.compose.yaml") for number in (0, 1)]
    for number, services in enumerate(nodes):
        assert set(services) == {"node"} | {spec.name for spec in lay_out(TWO_NODES).processes(number)}
    for services in nodes:
        for name, service in services.items():
            assert service["network_mode"] == "host" and "ports" not in service
            keys = [volume for volume in service.get("volumes", []) if "ROLLMILL_KEYS" in volume]
            role = name.partition("-")[0]
            assert keys == [] if name == "node" else keys[0].endswith(f"}}/{role}:/keys:ro") and len(keys) == 1
    address = nodes[0]["orchestrator"]["healthcheck"]["test"][-1]
    assert address.startswith("${NODE_HOST:?") and address.endswith("}:50050")
    assert nodes[0]["trainer-model0"]["healthcheck"]["test"][-1].startswith("127.0.0.1:")  # dialled by nobody else
    assert nodes[1]["inference-a"]["environment"]["ORCHESTRATOR_HOST_EXTERNAL"].startswith(
        "${ORCHESTRATOR_HOST_EXTERNAL:?"
    )
    assert "depends_on" in nodes[1]["inference-a"] and "orchestrator" not in nodes[1]["inference-a"]["depends_on"]


def test_a_gateway_on_another_node_is_dialled_there_and_has_its_keys_and_engine(tmp_path: Path) -> None:
    deploy(TWO_NODES, "compose", tmp_path, ["envgateway.node=1"])
    assert "envgateway" not in services_of(tmp_path, "node0.compose.yaml")
    gateway = services_of(tmp_path, "node1.compose.yaml")["envgateway"]
    assert gateway["environment"]["NODE_HOST"].startswith("${NODE_HOST:?")
    assert gateway["healthcheck"]["test"][-1] == gateway["environment"]["NODE_HOST"] + ":50080"
    assert any(volume.endswith("}/envgateway:/keys:ro") for volume in gateway["volumes"])


def test_other_nodes_do_not_see_starting_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policies\.NAME\.model\.path"):
        deploy(QUICKSTART, "compose", tmp_path, ["inference.a.node=1"])
    assert not list(tmp_path.iterdir())


def test_a_host_that_is_not_loopback_has_no_compose_file_on_one_node(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="share a loopback"):
        deploy(QUICKSTART, "compose", tmp_path, ["orchestrator.host=0.0.0.0"])
    assert not list(tmp_path.iterdir())


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    folder, rows = tmp_path / "mine", tmp_path / "elsewhere"
    for place in (folder, rows):
        place.mkdir()
    (rows / "rows.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    (folder / "rewards.py").write_text("def exact(task, completion):\n    return 1.0\n")
    (folder / "recipe.yaml").write_text(
        f"extends: quickstart\nname: mine\ndata: {{train: {{path: {rows / 'rows.jsonl'}}}}}\n"
    )
    return folder


def test_a_recipe_outside_the_checkout_is_mounted_where_it_lies_with_its_rows(own_folder: Path, tmp_path: Path) -> None:
    deploy(own_folder, "compose", tmp_path / "out")
    for name in ("orchestrator", "inference-a", "trainer-model0", "envgateway"):
        service = services_of(tmp_path / "out")[name]
        assert service["command"][:2] == ["start", str(own_folder)]
        binds = [mount for mount in service["volumes"] if isinstance(mount, dict)]
        assert [bind["source"] for bind in binds] == [str(tmp_path / "elsewhere"), str(own_folder)]
        assert all(bind["read_only"] and bind["target"] == bind["source"] for bind in binds)


def test_scripts_of_a_recipe_outside_the_checkout_name_the_folders_that_a_node_needs(
    own_folder: Path, tmp_path: Path
) -> None:
    deploy(own_folder, "scripts", tmp_path / "out")
    script = (tmp_path / "out" / "node0-orchestrator.sh").read_text()
    assert f"start {own_folder} orchestrator" in script
    assert f"Needs at the same paths on this node: {tmp_path / 'elsewhere'}, {own_folder}" in script


@pytest.mark.needs("Compose schema")
def test_compose_files_of_every_recipe_are_valid(tmp_path: Path) -> None:
    """By the schema of the Compose Specification, if its path is given."""
    schema = Path(os.environ["COMPOSE_SPEC_SCHEMA"])
    validator = jsonschema.Draft7Validator(yaml.safe_load(schema.read_text()))
    assert len(ONE_NODE) > 10
    for recipe in (*ONE_NODE, TWO_NODES):
        for profile in (None, "tiny"):
            for path in deploy(recipe, "compose", tmp_path, [], profile):
                validator.validate(yaml.safe_load(path.read_text()))


def test_each_node_has_its_scripts_and_they_pass_shellcheck(tmp_path: Path) -> None:
    paths = [*deploy(TWO_NODES, "scripts", tmp_path), *deploy(QUICKSTART, "scripts", tmp_path / "one", ["name=a 'b'"])]
    assert {path.name for path in paths if path.name.startswith("node1")} == {"node1.sh", "node1-inference-a.sh"}
    done = subprocess.run(
        [program("shellcheck"), *map(str, paths)], capture_output=True, text=True, check=False, timeout=PROCESS_S
    )
    assert done.returncode == 0, done.stdout


def stand_in(tmp_path: Path, body: str) -> dict[str, str]:
    """An environment with a PYTHON that records its arguments, then does ``body`` for the process ``$5``."""
    fake = tmp_path / "python"
    fake.write_text(f'#!/usr/bin/env bash\necho "$5 $ORCHESTRATOR_PORT ${{*:6}}" >> "{tmp_path}/asked"\n{body}\n')
    fake.chmod(0o755)
    return {**os.environ, "PYTHON": str(fake), "ROLLMILL_HOME": str(REPOSITORY)}


def run_node(tmp_path: Path, body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    deploy(QUICKSTART, "scripts", tmp_path, ["launch.stop_grace_s=0.2"])
    return subprocess.run(
        [str(tmp_path / "node0.sh"), "--profile", "tiny"],
        env=stand_in(tmp_path, body) | variables, capture_output=True, text=True, check=False, timeout=PROCESS_S,
    )  # fmt: skip


def test_the_script_of_a_node_starts_its_processes_and_stops_the_gateway_when_the_run_is_over(tmp_path: Path) -> None:
    done = run_node(tmp_path, '[ "$5" != envgateway ] || exec sleep 60')
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {line.split()[0] for line in asked} == {spec.name for spec in lay_out(QUICKSTART).processes(0)}
    assert all(line.endswith("50050 --set launch.stop_grace_s=0.2 --profile tiny") for line in asked)


def test_a_process_that_has_failed_before_its_node_waits_ends_the_node(tmp_path: Path) -> None:
    slow = tmp_path / "slow"  # bash reads it first: each command of the node's script begins 50 ms later
    slow.write_text('case "$0" in */node0.sh) trap "sleep 0.05" DEBUG ;; esac')
    done = run_node(tmp_path, '[ "$5" = orchestrator ] && kill -9 $$\nexec sleep 60', BASH_ENV=str(slow))
    assert done.returncode == 137 and "orchestrator ended with 137" in done.stderr


@pytest.mark.parametrize("num_known", [0, 2])
def test_a_node_that_is_told_to_end_between_a_start_and_its_entry_leaves_no_process(
    tmp_path: Path, num_known: int
) -> None:
    told = tmp_path / "told"
    told.write_text(
        'case "$0" in */node0.sh) known=0; trap \'case "$BASH_COMMAND" in name_of*) '
        f'if [ "$known" -eq {num_known} ]; then kill -TERM $$; fi; known=$((known + 1)) ;; esac\' DEBUG ;; esac'
    )
    done = run_node(tmp_path, f"exec sleep {2 * PROCESS_S:g}", BASH_ENV=str(told))  # waits for all that hold its output
    assert done.returncode == 143, done.stderr


def test_dockerfiles_pass_hadolint() -> None:
    done = subprocess.run(
        [program("hadolint"), *map(str, DOCKERFILES)], capture_output=True, text=True, check=False, timeout=PROCESS_S
    )
    assert done.returncode == 0, done.stdout


def test_every_image_is_built_from_a_dockerfile_that_is_there_and_files_that_are_sent(compose: dict[str, Any]) -> None:
    assert {service["build"]["dockerfile"] for service in compose.values()} == {"deploy/docker/service.Dockerfile"}
    sent = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for file in DOCKERFILES:
        copied = re.findall(r"^COPY (?!--)(.+) \S+$", file.read_text(), flags=re.MULTILINE)
        sources = {source for line in copied for source in line.split()}
        assert sources <= set(sent) and all((REPOSITORY / source).exists() for source in sources)


# --- metrics

ON = ["metrics.enabled=true"]
DASHBOARD = REPOSITORY / "deploy" / "grafana.json"
PANELS = json.loads(DASHBOARD.read_text())["panels"]


def test_every_metric_on_the_dashboard_exists() -> None:
    asked = {name for panel in PANELS for t in panel["targets"] for name in re.findall(r"rollmill_\w+", t["expr"])}
    assert len(asked) > 15
    assert asked <= {metric.name for metrics in CATALOGUE.values() for metric in metrics}


def test_every_metric_of_a_step_that_the_dashboard_shows_exists_and_says_what_it_is_taken_over() -> None:
    """Defect 12: no panel shows one population under the name of another."""
    for panel in PANELS:
        for target in panel["targets"]:
            for asked in re.findall(r'rollmill_step_metric\{metric=~?"([^"]+)"\}', target["expr"]):
                found = [m for m in step_metrics() if re.fullmatch(asked, m.name)]
                assert found, f"{panel['title']}: {asked}"
                assert all(m.of and m.help for m in found)


def test_prometheus_asks_every_process_of_the_pod_at_the_port_that_it_is_told(tmp_path: Path) -> None:
    deploy(QUICKSTART, "compose", tmp_path, ON)
    services = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    (job,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    ports = {c["labels"]["instance"]: int(c["targets"][0].rpartition(":")[2]) for c in job["static_configs"]}
    assert set(ports) == {"orchestrator", "inference-a", "trainer-model0", "publisher-model0", "envgateway"}
    assert len(set(ports.values())) == len(ports)
    for name in ("orchestrator", "inference-a", "trainer-model0", "envgateway"):
        overrides = [part for part in services[name]["command"] if part.startswith("metrics.")]
        assert load_recipe(QUICKSTART, overrides, {}).metrics.ports == ports
    assert services["prometheus"]["profiles"] == ["metrics"]
    assert services["node"]["ports"][-1] == "127.0.0.1:9090:9090"  # this machine alone
    assert (tmp_path / "grafana.json").read_text() == DASHBOARD.read_text()


def test_a_port_of_a_process_that_is_not_there_or_of_two_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.ports names 'inference-z'"):
        load_recipe(QUICKSTART, [*ON, "metrics.ports.inference-z=9000"], {})
    with pytest.raises(ConfigError, match="both 9000"):
        load_recipe(QUICKSTART, [*ON, "metrics.ports.inference-a=9000", "metrics.ports.orchestrator=9000"], {})


def test_the_documented_table_is_what_the_code_exposes() -> None:
    assert (DOCS / "observability.md").read_text().count(markdown_table()) == 1, (
        "run: python -c 'from tests.metrics_catalogue import markdown_table; print(markdown_table())'"
    )


# --- the forwarder

HERE = "127.0.0.9"  # stands for the pod's other address


@asynccontextmanager
async def forwarded(callers: set[str], *, answering: bool = True) -> AsyncIterator[int]:
    """A port at ``HERE`` that leads to an echo at the same port of loopback, which ends when its caller has said all."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    (port,) = free_ports(1, [LOOPBACK, HERE])
    target = await asyncio.start_server(echo, LOOPBACK, port) if answering else None
    server = await listen(HERE, port, (LOOPBACK, port), callers)
    try:
        yield port
    finally:
        server.close()
        if target is not None:
            target.close()


async def said_back(port: int, text: bytes, source: str) -> bytes:
    reader, writer = await asyncio.open_connection(HERE, port, local_addr=(source, 0))
    try:
        writer.write(text)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), WAIT_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_bytes_of_a_caller_from_this_machine_arrive_and_are_answered() -> None:
    text = bytes(range(256)) * 4096  # more than one buffer
    async with forwarded({"127.0.0.2"}) as port:
        assert await said_back(port, text, "127.0.0.2") == text


async def test_a_caller_from_elsewhere_is_hung_up_on() -> None:
    async with forwarded({"127.0.0.2"}) as port:
        assert await said_back(port, b"hello", "127.0.0.3") == b""
        assert await said_back(port, b"hello", "127.0.0.2") == b"hello"


async def test_a_caller_is_hung_up_on_while_the_orchestrator_is_not_there() -> None:
    async with forwarded({"127.0.0.2"}, answering=False) as port:
        assert await said_back(port, b"hello", "127.0.0.2") == b""


async def test_there_are_only_so_many_connections_at_once_and_one_that_ends_makes_room() -> None:
    async with forwarded({LOOPBACK}) as port:
        held = [await asyncio.open_connection(HERE, port, local_addr=(LOOPBACK, 0)) for _ in range(MAX_CONNECTIONS)]
        await asyncio.wait_for(_until_refused(port), WAIT_S)
        for _, writer in held:
            writer.close()
        await asyncio.wait_for(_until_answered(port), WAIT_S)


async def _until_refused(port: int) -> None:
    while await said_back(port, b"hello", LOOPBACK):
        pass


async def _until_answered(port: int) -> None:
    while await said_back(port, b"hello", LOOPBACK) != b"hello":
        await asyncio.sleep(0.01)


def test_the_default_gateway_is_read_from_the_routes() -> None:
    routes = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t010012AC\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth0\t000012AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    )
    assert gateways(routes) == {"172.18.0.1"}
    assert gateways("Iface Destination Gateway Flags\n") == set()
