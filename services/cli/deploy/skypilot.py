"""SkyPilot tasks of a recipe: ``task.yaml`` with a node for each node of the recipe, and one task for each inference
service that adds replicas to the run.

Every machine gets the checkout as its working directory, installs the packages, writes the launch scripts there
(``rollmill deploy --target scripts``, whose output depends on the recipe alone) and runs those of its node. The keys of
the run are made before, and reach the machines as SkyPilot's secrets; a machine unpacks those of its own roles.
"""

from __future__ import annotations

import os
import shlex
from typing import Any

import yaml

from services.cli.deploy.layout import CHECKOUT, Layout, container_name, options, own_gpus, written_by
from services.cli.deploy.sizes import Size, largest, size_of
from services.cli.plan.nodes import HOST_VARIABLE, NODE_HOST
from services.common.errors import ConfigError
from services.common.installing import COMPLETE
from services.common.security.bundle import VARIABLE as KEYS_VARIABLE
from services.orchestrator.tasks.catalogue import DATA_ROOT

TASK = "task.yaml"
WORKDIR = "~/sky_workdir"  # where SkyPilot puts the checkout
PYTHON = ".venv/bin/python"
# Engine, Python and pins of its servers.
SERVERS = (
    ("sglang", "3.12", "--constraint deploy/docker/inference-sglang.constraints.txt "),
    ("vllm", "3.12", "--constraint services/inference/engine/vllm_server/constraints.txt "),
)

Tree = dict[str, Any]

_UNPACK = """\
unpack() { # ROLE VARIABLE: the keys of one role, from SkyPilot's secret
  install --directory --mode=700 "$HOME/rollmill-keys/$1"
  base64 --decode <<<"${!2}" | tar --extract --gzip --directory "$HOME/rollmill-keys/$1"
}
"""

_RUN = """\
set -euo pipefail
{unpack}nodes=({nodes})
roles=({roles})
node="${{nodes[$SKYPILOT_NODE_RANK]}}"
NODE_0="$(head -n 1 <<<"$SKYPILOT_NODE_IPS")"
export PYTHON="$PWD/{python}" RUN_DIR="${{RUNS:-$PWD/runs}}/{run}"
{python} -m services.cli deploy {arguments} -o build/launch
{keys}if [ "$node" = 0 ]; then
  {node_0_host}exec build/launch/node0.sh
fi
export {host}="$NODE_0" RUN_DIR="$RUN_DIR-node$node"
exec "build/launch/node$node.sh"
"""

_KEYS = """\
for role in ${{roles[$SKYPILOT_NODE_RANK]}}; do unpack "$role" "{prefix}${{role^^}}"; done
unset {names}
export {variable}="$HOME/rollmill-keys"
"""

_REPLICA = """\
set -euo pipefail
{unpack}unpack inference {secret}
unset {secret}
export {variable}="$HOME/rollmill-keys" RUN_DIR="$PWD/runs/{run}" {ports}
exec {python} -m services.cli start {arguments} --replica-id "{name}-$(hostname)"
"""


def skypilot_files(layout: Layout, gpu: str | None = None) -> dict[str, str]:
    """File name -> text.

    Raises:
        ConfigError: the recipe takes GPUs and ``gpu`` names no kind, or other nodes need files that node 0 makes.
    """
    recipe, several = layout.recipe, len(layout.nodes) > 1
    if several and recipe.warm_start:
        raise ConfigError(
            f"{layout.path} makes starting checkpoints on node 0 (warm_start), which machines of SkyPilot do not share: name a "
            "checkpoint with policies.NAME.model.path"
        )
    secrets = sorted({_secret(role) for named in layout.roles for role in named}) if layout.has_keys else []
    keys = ""
    if secrets:
        keys = _KEYS.format(prefix=_secret(""), names=" ".join(secrets), variable=KEYS_VARIABLE)
    run = _RUN.format(
        unpack=_UNPACK if secrets else "",
        nodes=" ".join(map(str, layout.nodes)),
        roles=" ".join(f'"{" ".join(named)}"' for named in layout.roles),
        python=PYTHON,
        run=shlex.quote(layout.run_id),
        arguments=shlex.join([layout.path, "--target", "scripts", *options(layout)]),
        keys=keys,
        node_0_host=f'export {NODE_HOST}="$NODE_0"\n  ' if several else "",
        host=HOST_VARIABLE,
    )
    names = [name for named in layout.names.values() for name in named]
    size = largest(recipe, layout.names)
    task = _task(layout, container_name(recipe.name), size, gpu, names, secrets, run)
    task["num_nodes"] = len(layout.nodes)
    files = {TASK: _text(layout, gpu, secrets, f"All of {layout.path}", f"sky jobs launch {TASK}", task)}
    if several:
        for name in recipe.inference:
            replica = _replica(layout, name, gpu)
            launch = f"sky launch --num-nodes 4 --env {HOST_VARIABLE}=... replica-{name}.yaml"
            what = f"More replicas of inference-{name} for a run of {layout.path} that goes on"
            files[f"replica-{name}.yaml"] = _text(layout, gpu, [_secret("inference")], what, launch, replica)
    return files


def _replica(layout: Layout, name: str, gpu: str | None) -> Tree:
    """Each of its nodes is one more replica, which dials the orchestrator."""
    process, secret = f"inference-{name}", _secret("inference")
    service = layout.recipe.inference[name]
    size = size_of(layout.recipe, process, service.node)
    gpus = own_gpus(process, size.gpus) if service.gpus else {}
    run = _REPLICA.format(
        unpack=_UNPACK,
        secret=secret,
        variable=KEYS_VARIABLE,
        run=shlex.quote(layout.run_id),
        ports=" ".join(f"{key}={value}" for key, value in {**layout.ports, **gpus}.items()),
        python=PYTHON,
        arguments=shlex.join([layout.path, process, *options(layout)]),
        name=name,
    )
    task = _task(layout, f"{container_name(layout.recipe.name)}-{name}", size, gpu, [process], [secret], run)
    task["envs"] = {HOST_VARIABLE: None, **task.get("envs", {})}
    return task


def _task(
    layout: Layout, name: str, size: Size, gpu: str | None, processes: list[str], secrets: list[str], run: str
) -> Tree:
    resources: Tree = {"cpus": f"{size.cpus}+"}
    if size.memory_gib is not None:
        resources["memory"] = f"{size.memory_gib}+"
    if size.gpus:
        if gpu is None:
            raise ConfigError(
                f"{name} takes {size.gpus} GPUs on a machine, and SkyPilot asks which: write --gpu H100, or another"
            )
        resources["accelerators"] = f"{gpu}:{size.gpus}"
    # For `sky jobs launch`; a machine that is taken away counts apart.
    resources["job_recovery"] = {"strategy": "FAILOVER", "max_restarts_on_errors": layout.recipe.launch.restarts}
    task: Tree = {"name": name, "workdir": ".", "resources": resources}
    if secrets:
        task["secrets"] = dict.fromkeys(secrets)
    if layout.data_root() != "none":
        task["envs"] = {DATA_ROOT: None if layout.data_root() == "required" else ""}
    if mounts := _mounts(layout):
        task["file_mounts"] = mounts
    return task | {"setup": _setup(layout, processes), "run": run}


def _mounts(layout: Layout) -> dict[str, str]:
    """Folders of this machine at the paths at which the recipe names them; git may ignore those in the checkout."""
    mounts = {place: place for place in layout.own_folders()}
    for path in map(os.fspath, layout.worlds()):
        inside = os.path.relpath(path, CHECKOUT) if os.path.isabs(path) else path
        if inside.startswith("../"):
            mounts[path] = path
        else:
            mounts[f"{WORKDIR}/{inside}"] = inside
    return mounts


def _setup(layout: Layout, processes: list[str]) -> str:
    """Packages at the versions of the images. Servers have pins of their own, so each has an environment of its own."""
    extras = sorted({name.partition("-")[0] for name in processes})
    if "envgateway" in extras and (environment := layout.environment()):
        extras.append(environment)
    pip = "python3 -m uv pip install --quiet --no-config"  # pyproject.toml constrains uv to the project's own pins
    lines = [
        "set -euo pipefail",
        "python3 -m pip install --quiet uv",
        "python3 -m uv venv --quiet --allow-existing --python 3.11 .venv",
        f"{pip} --python {PYTHON} --constraint constraints.txt --editable '.[{','.join(extras)}]'",
    ]
    engines = [
        layout.recipe.inference[name.partition("-")[2]].engine for name in processes if name.startswith("inference-")
    ]
    for engine, python, pins in SERVERS:
        if engine in engines:
            folder = f".venv-{engine}"  # where the engine looks for the interpreter of its servers
            lines += [
                f"python3 -m uv venv --quiet --allow-existing --python {python} {folder}",
                f"{pip} --python {folder}/bin/python {pins}'.[inference,{engine}]'",
                f"touch {folder}/{COMPLETE}",
            ]
    return "\n".join(lines) + "\n"


def _secret(role: str) -> str:
    """The name of the secret with the keys of a role."""
    return f"ROLLMILL_KEYS_{role.upper()}"


def _text(layout: Layout, gpu: str | None, secrets: list[str], what: str, launch: str, task: Tree) -> str:
    command, _, file = launch.rpartition(" ")
    shown = " ".join([command, *(f"--secret {name}" for name in secrets), f"DIR/{file}"])
    head = f"# {what}. Written, not edited: {written_by(layout, 'skypilot', gpu)} -o DIR\n# In the checkout: {shown}\n"
    if secrets:
        head += (
            f"# Before: rollmill keys {shlex.quote(layout.path)} -o keys, and for each ROLE in keys\n"
            f'#   export {_secret("ROLE")}="$(tar -C keys/role -cz . | base64 -w 0)"\n'
        )
    return head + yaml.dump(task, Dumper=_Blocks, sort_keys=False, allow_unicode=True, width=120)


class _Blocks(yaml.SafeDumper):
    """Writes text of several lines as a block, as people write scripts in YAML."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _block)
