"""A Slurm job of a recipe: ``job.sbatch``, the launch scripts that its tasks run, and one job for each inference service
that adds replicas to the run.

The run lies on a file system that all nodes see. A job that Slurm requeues (a node that fails, a preemption, its time
limit) goes on with its run, whose directory has the job's number.
"""

from __future__ import annotations

import shlex

from services.cli.deploy.layout import Layout, container_name, options, other_variables, own_gpus, written_by
from services.cli.deploy.scripts import launch_scripts
from services.cli.deploy.sizes import Size, largest, size_of
from services.cli.plan.nodes import HOST_VARIABLE, NODE_HOST

JOB, TASK = "job.sbatch", "task.sh"
NODE_0 = "node_0"  # in the run directory: the name of the machine that runs node 0 at the moment
FAILED = "failed_with"  # there: the exit code of the first node that failed, while a job is ending
BEFORE_LIMIT_S = 180  # the signal before the time limit, in which the job is requeued

_JOB = """\
#!/usr/bin/env bash
{options}
# {what}
# Written, not edited: {written_by} -o DIR
# In the checkout, on a file system that all nodes see: sbatch --time=... [--partition=...] {place}/{job}
# To go on with a run in another job: sbatch --export=ALL,RUN_DIR=runs/NAME ...
# Variables: RUN_DIR (runs/{run}-JOB), LAUNCH (where these files are; {place}), PYTHON (python){variables}.
set -euo pipefail
export LAUNCH="${{LAUNCH:-{place}}}"
export RUN_DIR="${{RUN_DIR:-$PWD/runs/{run}-$SLURM_JOB_ID}}"
export FAILED="$RUN_DIR/{failed}"
NODE_0="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export NODE_0
rm -f "$FAILED"
requeue() {{
  echo "requeueing job $SLURM_JOB_ID; its run is $RUN_DIR" >&2
  scontrol requeue "$SLURM_JOB_ID"
}}
trap requeue USR1 # {before_s} s before the time limit
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}" # srun does not take it from the job
srun --kill-on-bad-exit=1 "$LAUNCH/{task}" "$@" &
step=$!
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # the signal has ended the wait, not the step
  code=0
  wait "$step" || code=$?
done
# The first node that failed counts: Slurm ends the others, and srun returns the highest code.
if [ -e "$FAILED" ]; then code="$(cat "$FAILED")"; fi
# Killed, or asks to be started again: other nodes, or another attempt, may do better. Any other code is final.
if [ "$code" -eq 137 ] || [ "$code" -eq 75 ]; then
  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then requeue; fi
fi
exit "$code"
"""

_TASK = """\
#!/usr/bin/env bash
# {what}
# Written, not edited: {written_by} -o DIR
# Variables, from {job}: RUN_DIR, NODE_0, LAUNCH, FAILED (the file for its exit code), SLURM_NODEID.
set -euo pipefail
run() {{ # SCRIPT ...: as exec, but notes the code of a failure
  "$@" &
  script=$!
  trap 'kill -TERM "$script" 2>/dev/null || true' TERM
  code=0
  wait "$script" || code=$?
  while kill -0 "$script" 2>/dev/null; do # the signal has ended the wait, not the script
    code=0
    wait "$script" || code=$?
  done
  if [ "$code" -ne 0 ]; then (set -o noclobber && echo "$code" >"$FAILED") 2>/dev/null || true; fi
  exit "$code"
}}
nodes=({nodes})
roles=({roles})
node="${{nodes[$SLURM_NODEID]}}"
if [ "$node" = 0 ]; then
  mkdir -p "$RUN_DIR"
  printf '%s\\n' "$NODE_0" >"$RUN_DIR/{node_0}"
  {node_0_host}run "$LAUNCH/node0.sh" "$@"
fi
export {host}="$NODE_0" RUN_DIR="$RUN_DIR/nodes/$node"
for role in ${{roles[$SLURM_NODEID]}}; do
  until [ -e "$RUN_DIR/keys/$role/cert.pem" ]; do # node 0 makes the bundle
    if [ "$SECONDS" -gt {wait_s} ]; then
      echo "node 0 ($NODE_0) has made no $RUN_DIR/keys/$role within {wait_s} s: is the run directory on a file system" \\
        "that all nodes see? See the output of node 0" >&2
      exit 1
    fi
    sleep 1
  done
done
run "$LAUNCH/node$node.sh" "$@"
"""

_REPLICA = """\
#!/usr/bin/env bash
{options}
# {what}
# Written, not edited: {written_by} -o DIR
# In the checkout, while the run goes on: sbatch --array=1-4 --time=... --export=ALL,RUN_DIR=runs/NAME {place}/{file}
# scancel JOB_2 takes the second one away again; the end of the run ends all.
# Variables: RUN_DIR (the run's directory; required), PYTHON (python).
set -euo pipefail
: "${{RUN_DIR:?set RUN_DIR to the directory of the run, with sbatch --export=ALL,RUN_DIR=runs/NAME}}"
if [ ! -e "$RUN_DIR/{node_0}" ]; then
  echo "$RUN_DIR is no run of a job of {job}: it has no file {node_0}" >&2
  exit 1
fi
{host}="$(cat "$RUN_DIR/{node_0}")"
export {host} ROLLMILL_KEYS="$RUN_DIR/keys/inference" {ports}
exec "${{PYTHON:-python}}" -m services.cli start {arguments} --replica-id "{name}-${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}-${{SLURM_ARRAY_TASK_ID:-0}}"
"""


def slurm_files(layout: Layout, place: str, gpu: str | None = None) -> dict[str, str]:
    """File name -> text. ``place``: their directory as the nodes see it, absolute or relative to the checkout."""
    files = launch_scripts(layout)
    named = shlex.quote(place)
    several = len(layout.nodes) > 1
    common = {"job": JOB, "node_0": NODE_0, "host": HOST_VARIABLE, "place": named}
    common["written_by"] = written_by(layout, "slurm", gpu)
    files[JOB] = _JOB.format(
        what=f"All of {layout.path} in one job: {len(layout.nodes)} node{'s' if several else ''}, a task on each.",
        options=_options(
            layout,
            largest(layout.recipe, layout.names),
            gpu,
            (f"--nodes={len(layout.nodes)}", "--ntasks-per-node=1", f"--signal=B:USR1@{BEFORE_LIMIT_S}"),
        ),
        run=layout.run_id,
        task=TASK,
        failed=FAILED,
        before_s=BEFORE_LIMIT_S,
        restarts=layout.recipe.launch.restarts,
        variables=other_variables(layout, "all nodes"),
        **common,
    )
    files[TASK] = _TASK.format(
        what=f"The processes of one node of {layout.path}, as a task of {JOB}.",
        nodes=" ".join(map(str, layout.nodes)),
        roles=" ".join(f'"{" ".join(named)}"' for named in layout.roles),
        wait_s=3600,
        node_0_host=f'export {NODE_HOST}="$NODE_0"\n  ' if several else "",
        **common,
    )
    if several:  # else the run has neither keys nor an address that another node reaches
        for name, service in layout.recipe.inference.items():
            files[f"replica-{name}.sbatch"] = _replica(layout, name, service.node, gpu, common)
    return files


def _replica(layout: Layout, name: str, node: int, gpu: str | None, common: dict[str, str]) -> str:
    """A job, or an array of jobs, each with one more replica of an inference service."""
    process = f"inference-{name}"
    size = size_of(layout.recipe, process, node)
    # A scheduler shows a job its own GPUs, numbered from 0. Two replicas of one machine must not want the same port.
    variable = process.upper().replace("-", "_")
    ports = {**layout.ports, f"{variable}_PORT": "0"}
    gpus = own_gpus(process, size.gpus) if layout.recipe.inference[name].gpus else {}
    return _REPLICA.format(
        what=f"More replicas of {process} for a run of {layout.path} that goes on.",
        options=_options(layout, size, gpu, ("--nodes=1", "--ntasks=1"), f"-{name}"),
        file=f"replica-{name}.sbatch",
        arguments=shlex.join([layout.path, process, *options(layout)]),
        ports=" ".join(f"{key}={value}" for key, value in {**ports, **gpus}.items()),
        name=name,
        **common,
    )


def _options(layout: Layout, size: Size, gpu: str | None, own: tuple[str, ...], more: str = "") -> str:
    """The lines of sbatch. ``--mem=0`` is all memory of a node, where the need is not known before the run."""
    kind = "" if gpu is None else f"{gpu}:"
    lines = [
        f"--job-name={container_name(layout.recipe.name)}{more}",
        *own,
        f"--cpus-per-task={size.cpus}",
        f"--mem={f'{size.memory_gib}G' if size.memory_gib is not None else 0}",
        *([f"--gpus-per-node={kind}{size.gpus}"] if size.gpus else []),
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
    ]
    return "\n".join(f"#SBATCH {line}" for line in lines)
