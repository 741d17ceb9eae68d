"""Launch scripts of a recipe: one for each process, and one for each node that starts and stops its processes."""

from __future__ import annotations

import shlex

from services.cli.deploy.layout import Layout, options, other_variables, written_by
from services.cli.plan.nodes import HOST_VARIABLE, NODE_HOST

_HEAD = """\
#!/usr/bin/env bash
# {what}
# Written, not edited: {written_by} -o DIR
# Variables: {variables}.
set -euo pipefail
"""
_COMMON = "ROLLMILL_HOME (the checkout; the working directory), RUN_DIR (runs/NAME of the recipe), PYTHON (python)"

_PROCESS = """\
cd "${{ROLLMILL_HOME:-.}}"
export {ports}
exec "${{PYTHON:-python}}" -m services.cli start {arguments} "$@"
"""

# Its orchestrator ends when the run is over. The others then leave by themselves, but for the gateway, which is stopped.
_NODE = """\
names=({names})
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
declare -A name_of
stop() {{ # EXIT CODE
  trap '' TERM INT
  # not only those of name_of: the signal may come between a start and its entry
  for pid in $(jobs -p); do kill -TERM "$pid" 2>/dev/null || true; done
  wait
  exit "$1"
}}
trap 'stop 143' TERM INT
for name in "${{names[@]}}"; do
  "$here/node{node}-$name.sh" "$@" &
  name_of[$!]="$name"
done
while [ "${{#name_of[@]}}" -gt 0 ]; do
  for pid in "${{!name_of[@]}}"; do # not wait -n: it does not see a process that ended before it began to wait
    if kill -0 "$pid" 2>/dev/null; then continue; fi
    code=0
    wait "$pid" || code=$?
    if [ "$pid" = "${{grace:-}}" ]; then stop 0; fi
    name="${{name_of[$pid]}}"
    unset "name_of[$pid]"
    if [ "$code" -ne 0 ]; then
      echo "$name ended with $code; stopping the other processes of this script" >&2
      stop "$code"
    fi
    if [ "$name" = orchestrator ]; then
      sleep {grace} &
      grace=$!
      name_of[$grace]=grace
    fi
  done
  sleep 0.2 &
  wait $! || true # and not in the foreground: a signal is handled at once
done
"""


def launch_scripts(layout: Layout) -> dict[str, str]:
    """File name -> text, for every node of the recipe: ``node0.sh``, ``node0-orchestrator.sh``, ...

    Every script passes its own arguments on, such as ``--profile tiny``, so they must be the same on every node.
    """
    files = {}
    for node, names in layout.names.items():
        files[f"node{node}.sh"] = _node(layout, node, names)
        files |= {f"node{node}-{name}.sh": _process(layout, node, name) for name in names}
    return files


def _process(layout: Layout, node: int, name: str) -> str:
    arguments = shlex.join([layout.path, name, *options(layout)])
    ports = " ".join(f"{variable}={port}" for variable, port in layout.ports.items())
    return _head(layout, node, f"Starts {name} of {layout.path}, which belongs to node {node}.") + _PROCESS.format(
        ports=ports, arguments=arguments
    )


def _node(layout: Layout, node: int, names: list[str]) -> str:
    what = f"Starts all of {layout.path} that belongs to node {node}, and stays until the run is over; then stops the rest."
    grace = f"{layout.recipe.launch.stop_grace_s:g}"
    return _head(layout, node, what) + _NODE.format(names=" ".join(names), node=node, grace=grace)


def _head(layout: Layout, node: int, what: str) -> str:
    variables = _COMMON
    if node != 0:
        variables = (
            f"{HOST_VARIABLE} (name or address of node 0; required), ROLLMILL_KEYS (keys copied from node 0; required), "
            f"{NODE_HOST} (this node's address, if others may fetch weights here), {variables}"
        )
    elif len(layout.nodes) > 1:
        variables = f"{NODE_HOST} (this node's name or address for the others; its host name), {variables}"
    variables += other_variables(layout, "this node")
    return _HEAD.format(what=what, written_by=written_by(layout, "scripts"), variables=variables)
