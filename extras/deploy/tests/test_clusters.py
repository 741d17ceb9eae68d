"""``rollmill deploy`` for Slurm, Kubernetes and SkyPilot: valid by the schedulers' own words, sizes from the recipe, keys by
role, and wrong input refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extras.deploy.clusters import Size, size_of, size_of_node
from extras.deploy.command import write_deployment as deploy
from extras.deploy.files import lay_out
from services.common.config.loading import load_recipe
from services.common.errors import ConfigError
from services.common.security import keys as bundle
from services.common.security.keys import FILES
from tests import needs
from tests.stub_slurm import StubSlurm
from tests.waiting import PROCESS_S, wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
RECIPES = REPOSITORY / "recipes"
QUICKSTART = RECIPES / "quickstart"
TWO_NODES = RECIPES / "code-multi-agent" / "qwen3-8b-codegen-verifier-m2po-full-2node"
ALFWORLD = RECIPES / "alfworld" / "qwen2.5-7b-instruct-m2po-full"
TWO = ["inference.a.node=1"]
NODE_NAME = "127.0.0.1"


def documents(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [tree for name in names for tree in yaml.safe_load_all((folder / name).read_text())]


def of_kind(trees: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [tree for tree in trees if tree["kind"] == kind]


def containers(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in tree["spec"]["template"]["spec"]["containers"]}


# --- sizes


def test_sizes_are_those_of_the_recipe() -> None:
    recipe = load_recipe(TWO_NODES, (), {})
    assert (size_of(recipe, "inference-a", 1).gpus, size_of(recipe, "trainer-model0", 0).gpus) == (8, 2)
    whole = size_of_node(recipe, 0, [process.name for process in lay_out(TWO_NODES).processes(0)])
    assert whole.gpus == 8, "trainers are on GPUs 4 to 7"
    parts = [size_of(recipe, name, 0).memory_gib for name in ("inference-b", "trainer-model0", "trainer-model1")]
    assert None not in parts and whole.memory_gib is not None and whole.memory_gib > sum(filter(None, parts))


def test_a_cpu_recipe_asks_for_no_gpu_and_an_unknown_model_for_no_memory() -> None:
    recipe = load_recipe(QUICKSTART, (), {})
    assert size_of(recipe, "inference-a", 0) == Size(gpus=0, cpus=2, memory_gib=None)
    assert size_of_node(recipe, 0, ["orchestrator", "trainer-model0"]).memory_gib is None


# --- Slurm


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[StubSlurm]:
    made = StubSlurm(tmp_path / "slurm", NODE_NAME)
    yield made
    made.end()


def job_of(scheduler: StubSlurm, tmp_path: Path, body: str, *settings: str) -> tuple[str, list[str]]:
    """A job whose python notes its process and variables, then does ``body``; the number of the job and the notes."""
    deploy(QUICKSTART, "slurm", tmp_path / "out", [*TWO, "launch.stop_grace_s=0.2", *settings])
    fake = tmp_path / "python"
    notes = tmp_path / "notes"
    fake.write_text(
        f'#!/usr/bin/env bash\necho "$5 $RUN_DIR ${{NODE_HOST:-none}} ${{ORCHESTRATOR_HOST_EXTERNAL:-none}}" >> "{notes}"\n{body}\n'
    )
    fake.chmod(0o755)
    keys = tmp_path / "run" / "nodes" / "1" / "keys" / "inference"
    keys.mkdir(parents=True)
    (keys / bundle.CERTIFICATE).touch()
    variables = {"PYTHON": str(fake), "RUN_DIR": str(tmp_path / "run")}
    job = scheduler.submit("--time=1:00:00", str(tmp_path / "out" / "job.sbatch"), cwd=REPOSITORY, **variables)
    wait_until(lambda: scheduler.exit_code(job) is not None, "the end of the job")
    return job, sorted(set(notes.read_text().splitlines()))


@pytest.mark.slow
def test_a_job_starts_the_processes_of_every_node_and_ends_with_the_run(scheduler: StubSlurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job, notes = job_of(scheduler, tmp_path, '[ "$5" != envgateway ] || exec sleep 60')
    assert notes == [
        f"envgateway {run} {NODE_NAME} none",
        f"inference-a {run}/nodes/1 none {NODE_NAME}",
        f"orchestrator {run} {NODE_NAME} none",
        f"trainer-model0 {run} {NODE_NAME} none",
    ]
    assert (scheduler.exit_code(job), scheduler.restarts(job)) == (0, 0)
    assert (run / "node_0").read_text().strip() == NODE_NAME


@pytest.mark.slow
@pytest.mark.parametrize(("body", "restarts", "code"), [("kill -9 $$", 2, 137), ("exit 2", 0, 2)])
def test_a_job_whose_process_is_killed_is_requeued_and_one_that_is_wrong_is_not(
    scheduler: StubSlurm, tmp_path: Path, body: str, restarts: int, code: int
) -> None:
    job, _ = job_of(
        scheduler, tmp_path, f'if [ "$5" = trainer-model0 ]; then {body}; fi; exec sleep 60', "launch.restarts=2"
    )
    assert (scheduler.exit_code(job), scheduler.restarts(job)) == (code, restarts)


def test_a_replica_needs_the_directory_of_a_run(scheduler: StubSlurm, tmp_path: Path) -> None:
    deploy(QUICKSTART, "slurm", tmp_path / "out", TWO)
    script = str(tmp_path / "out" / "replica-a.sbatch")
    assert "set RUN_DIR to the directory of the run" in scheduler.call(script, cwd=REPOSITORY, RUN_DIR="").stderr
    assert "is no run of a job of job.sbatch" in scheduler.call(script, cwd=REPOSITORY, RUN_DIR=str(tmp_path)).stderr


def test_job_files_pass_shellcheck_and_ask_for_what_the_recipe_needs(tmp_path: Path) -> None:
    needs.check("shellcheck")
    paths = deploy(TWO_NODES, "slurm", tmp_path, ["name=a 'b'"], None, "H100")
    scripts = [str(path) for path in paths if not path.name.startswith("node")]  # those are test_deploy's
    done = subprocess.run(
        [str(needs.installed("shellcheck")), *scripts], capture_output=True, text=True, check=False, timeout=PROCESS_S
    )
    assert done.returncode == 0, done.stdout
    asked = [
        line.removeprefix("#SBATCH --")
        for line in (tmp_path / "job.sbatch").read_text().splitlines()
        if "SBATCH" in line
    ]
    assert {"nodes=2", "gpus-per-node=H100:8", "requeue"} <= set(asked)
    assert not any(line.startswith("mem=0") for line in asked)


def test_a_run_on_one_machine_has_no_job_for_replicas(tmp_path: Path) -> None:
    names = {path.name for path in deploy(QUICKSTART, "slurm", tmp_path)}
    assert not any(name.startswith("replica") for name in names)
    assert "--mem=0" in (tmp_path / "job.sbatch").read_text(), "the size of the model is not known before the run"
    assert "gpus-per-node" not in (tmp_path / "job.sbatch").read_text()


# --- Kubernetes


@pytest.mark.needs("kubernetes-validate")
@pytest.mark.parametrize("recipe", [TWO_NODES, QUICKSTART, ALFWORLD], ids=lambda path: path.name)
def test_manifests_are_valid_by_the_published_schemas(tmp_path: Path, recipe: Path) -> None:
    import kubernetes_validate

    paths = deploy(recipe, "kubernetes", tmp_path, [], None, "H100")
    files = [path.name for path in paths if path.name != "kustomization.yaml"]
    kinds = set()
    for tree in documents(tmp_path, *files):
        for version in ("1.27", "1.37"):
            kubernetes_validate.validate(tree, version, strict=True)
        kinds.add(tree["kind"])
    assert {"Job", "Deployment", "Service", "NetworkPolicy", "PersistentVolumeClaim"} <= kinds


@pytest.fixture
def manifests(tmp_path: Path) -> list[dict[str, Any]]:
    deploy(TWO_NODES, "kubernetes", tmp_path)
    return documents(tmp_path, "run.yaml", "replicas.yaml", "volumes.yaml", "kustomization.yaml")


def test_every_inference_service_is_a_deployment_whose_replicas_have_names_of_their_own(
    manifests: list[dict[str, Any]],
) -> None:
    (job,) = of_kind(manifests, "Job")
    assert set(containers(job)) == {"orchestrator", "envgateway", "trainer-model0", "trainer-model1"}
    deployments = of_kind(manifests, "Deployment")
    assert [set(containers(tree)) for tree in deployments] == [{"inference-a"}, {"inference-b"}]
    for tree in deployments:
        (container,) = containers(tree).values()
        assert container["args"][-2:] == ["--replica-id", "$(POD_NAME)"]
        (service,) = of_kind(manifests, "Service")
        assert {"name": "ORCHESTRATOR_HOST_EXTERNAL", "value": service["metadata"]["name"]} in container["env"]
        labels = tree["spec"]["template"]["metadata"]["labels"]
        assert tree["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_a_container_has_its_gpus_from_0_and_the_keys_of_its_role_alone(manifests: list[dict[str, Any]]) -> None:
    (job,) = of_kind(manifests, "Job")
    trainer = containers(job)["trainer-model1"]
    assert trainer["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert {"name": "TRAINER_MODEL1_GPUS", "value": "0,1"} in trainer["env"], "6 and 7 of the machine"
    for tree in [job, *of_kind(manifests, "Deployment")]:
        for name, container in containers(tree).items():
            keys = [mount["name"] for mount in container["volumeMounts"] if mount["name"].startswith("keys-")]
            assert keys == [f"keys-{name.partition('-')[0]}"]
    mounted = {mount["name"] for mount in containers(job)["envgateway"]["volumeMounts"]}
    assert not mounted & {"runs", "models"} and not any(name.startswith("shm") for name in mounted)


def test_secrets_hold_what_rollmill_keys_writes_and_no_manifest_holds_one(
    manifests: list[dict[str, Any]], tmp_path: Path
) -> None:
    (kustomization,) = of_kind(manifests, "Kustomization")
    secrets = {secret["name"]: secret["files"] for secret in kustomization["secretGenerator"]}
    assert len(secrets) == 4
    mounted = {
        volume["secret"]["secretName"]: {item["key"] for item in volume["secret"]["items"]}
        for tree in [*of_kind(manifests, "Job"), *of_kind(manifests, "Deployment")]
        for volume in tree["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    }
    assert mounted == {name: {line.partition("=")[0] for line in files} for name, files in secrets.items()}
    assert not any("ca.key" in line or "token.key" in line for files in secrets.values() for line in files)
    assert all(len(keys) in (len(FILES), 2 * len(FILES)) for keys in mounted.values())
    assert of_kind(manifests, "Secret") == []


def test_probes_ask_the_health_service_where_it_answers(manifests: list[dict[str, Any]]) -> None:
    (job,) = of_kind(manifests, "Job")
    ports = lay_out(TWO_NODES).ports
    for name, place in (
        ("orchestrator", "$NODE_HOST:50050"),
        ("trainer-model0", f"127.0.0.1:{ports['TRAINER_MODEL0_PORT']}"),
    ):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = containers(job)[name][probe]["exec"]["command"][-1]
            assert command.endswith(f"services.common.rpc.client {place}")


def test_the_gateway_may_make_user_namespaces_only_where_its_sandbox_needs_them(tmp_path: Path) -> None:
    profiles = []
    for settings in (["description=$(HOME)"], ["envgateway.sandbox.allow_tier_0=true"]):
        deploy(QUICKSTART, "kubernetes", tmp_path, settings)
        (job,) = of_kind(documents(tmp_path, "run.yaml"), "Job")
        arguments = containers(job)["orchestrator"]["args"]
        assert settings[0].replace("$(", "$$(") in arguments, "Kubernetes puts no variable in its place"
        found = {name: each["securityContext"]["seccompProfile"]["type"] for name, each in containers(job).items()}
        profiles.append(found)
    assert profiles[0].pop("envgateway") == "Unconfined"
    assert {*profiles[0].values(), *profiles[1].values()} == {"RuntimeDefault"}


def test_names_fit_kubernetes_and_long_ones_stay_apart(tmp_path: Path) -> None:
    names = []
    for run in ("A_b c.1", "x" * 90 + "1", "x" * 90 + "2"):
        deploy(QUICKSTART, "kubernetes", tmp_path, [f"run.id={run}"])
        trees = documents(tmp_path, "run.yaml", "replicas.yaml", "volumes.yaml")
        found = [tree["metadata"]["name"] for tree in trees]
        assert all(len(name) <= 63 and name.strip("-") == name and name.islower() for name in found)
        names.append(found[0])
    assert len(set(names)) == 3


# --- SkyPilot


def test_a_task_runs_the_scripts_of_its_node_with_the_keys_of_its_roles_alone(tmp_path: Path) -> None:
    """The text of ``run`` as SkyPilot executes it, on the second of two machines."""
    settings = ["warm_start={}", "policies.model0.model.path=models/mine", *TWO]
    deploy(QUICKSTART, "skypilot", tmp_path, settings)
    task = yaml.safe_load((tmp_path / "task.yaml").read_text())
    assert task["num_nodes"] == 2 and set(task["secrets"]) == {
        f"ROLLMILL_KEYS_{role}" for role in ("ENVGATEWAY", "INFERENCE", "ORCHESTRATOR", "TRAINER")
    }
    home, work = tmp_path / "home", tmp_path / "work"
    (work / ".venv" / "bin").mkdir(parents=True)
    script = work / "build" / "launch" / "node1.sh"
    script.parent.mkdir(parents=True)
    script.write_text('#!/bin/sh\nenv | grep -E "^(ROLLMILL|RUN_DIR|ORCH)" | sort; find "$ROLLMILL_KEYS" -type f\n')
    (work / ".venv" / "bin" / "python").write_text('#!/bin/sh\necho "$@" >> asked\n')
    for file in (script, work / ".venv" / "bin" / "python"):
        file.chmod(0o755)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "cert.pem").write_text("mine")
    packed = subprocess.run(
        f"tar -C {shlex.quote(str(tmp_path / 'keys'))} -cz . | base64 -w 0",
        shell=True, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    variables = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("ROLLMILL", "RUN_DIR", "ORCH"))},
        "HOME": str(home),
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "192.0.2.1\n192.0.2.2",
    }
    home.mkdir()
    done = subprocess.run(
        ["bash", "-c", task["run"]], cwd=work, env={**variables, **dict.fromkeys(task["secrets"], packed)},
        capture_output=True, text=True, check=False, timeout=PROCESS_S,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "ORCHESTRATOR_HOST_EXTERNAL=192.0.2.1",
        f"ROLLMILL_KEYS={home}/rollmill-keys",
        f"RUN_DIR={work}/runs/quickstart-node1",
        f"{home}/rollmill-keys/inference/cert.pem",
    ], done.stderr
    asked = shlex.split((work / "asked").read_text())
    assert asked[2:4] == ["deploy", "recipes/quickstart"] and asked[-2:] == ["-o", "build/launch"]


@pytest.mark.needs("skypilot")
@pytest.mark.parametrize("recipe", [TWO_NODES, QUICKSTART, ALFWORLD], ids=lambda path: path.name)
def test_skypilot_reads_its_tasks(tmp_path: Path, recipe: Path) -> None:
    settings = ["envgateway.alfworld.data=/usr"] if recipe == ALFWORLD else []  # mounted files must be there
    paths = deploy(recipe, "skypilot", tmp_path, settings, None, "H100")
    for path in paths:
        tree = yaml.safe_load(path.read_text())
        tree["envs"] = {name: value or "x" for name, value in tree.get("envs", {}).items()}  # as with --env
        path.write_text(yaml.safe_dump(tree))
    read = (
        "import json, sys, sky\n"
        "for path in sys.argv[1:]:\n"
        "    task = sky.Task.from_yaml(path)\n"
        "    print(json.dumps([task.name, task.num_nodes, [str(each.accelerators) for each in task.resources]]))\n"
    )
    done = subprocess.run(
        [os.environ["ROLLMILL_SKYPILOT_PYTHON"], "-c", read, *map(str, paths)],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tasks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert tasks[0][0].startswith("rollmill-") and len(tasks) == len(paths)
    assert tasks[0][1] == len(lay_out(recipe).nodes)


# --- wrong input


@pytest.mark.parametrize(
    ("target", "recipe", "settings", "gpu", "told"),
    [
        ("kubernetes", QUICKSTART, ["security.tls=off"], None, "leave out security.tls: off"),
        ("kubernetes", QUICKSTART, ["orchestrator.host=192.0.2.1"], None, "a pod gets its address when it starts"),
        ("kubernetes", QUICKSTART, ["inference.a.engine=vllm"], None, "engine is vllm, for which there is no image"),
        ("kubernetes", QUICKSTART, [], "H100:8", "write its name alone, such as H100"),
        ("slurm", QUICKSTART, [], "", "is no kind of GPU"),
        ("compose", QUICKSTART, [], "H100", "compose has none: leave it out"),
        ("skypilot", TWO_NODES, [], None, "takes 8 GPUs on a machine, and SkyPilot asks which: write --gpu H100"),
        ("skypilot", QUICKSTART, TWO, None, r"name a checkpoint with policies\.NAME\.model\.path"),
        ("slurm", RECIPES / "nowhere", [], None, "no recipe at"),
        ("nomad", QUICKSTART, [], None, "no target 'nomad': write one of compose, scripts, "),
        ("kubernetes", QUICKSTART, ["inference.b.nodes=3"], None, "inference.b.nodes"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(
    tmp_path: Path, target: str, recipe: Path, settings: list[str], gpu: str | None, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        deploy(recipe, target, tmp_path / "out", settings, None, gpu)
    assert not (tmp_path / "out").exists()
