#!/usr/bin/env bash
# The processes of one node of {{ layout.path }}, as a task of job.sbatch.
# Written, not edited: {{ written_by }} -o DIR
# Variables, from job.sbatch: RUN_DIR, NODE_0, LAUNCH, FAILED (the file for its exit code), SLURM_NODEID.
set -euo pipefail
run() { # SCRIPT ...: as exec, but notes the code of a failure
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
}
nodes=({{ layout.nodes | join(" ") }})
roles=({{ layout.roles | map("join", " ") | map("tojson") | join(" ") }})
node="${nodes[$SLURM_NODEID]}"
if [ "$node" = 0 ]; then
  mkdir -p "$RUN_DIR"
  printf '%s\n' "$NODE_0" >"$RUN_DIR/node_0"
{% if layout.nodes | length > 1 %}
  export NODE_HOST="$NODE_0"
{% endif %}
  run "$LAUNCH/node0.sh" "$@"
fi
export ORCHESTRATOR_HOST_EXTERNAL="$NODE_0" RUN_DIR="$RUN_DIR/nodes/$node"
for role in ${roles[$SLURM_NODEID]}; do
  until [ -e "$RUN_DIR/keys/$role/cert.pem" ]; do # node 0 makes the bundle
    if [ "$SECONDS" -gt 3600 ]; then
      echo "node 0 ($NODE_0) has made no $RUN_DIR/keys/$role within 3600 s: is the run directory on a file system" \
        "that all nodes see? See the output of node 0" >&2
      exit 1
    fi
    sleep 1
  done
done
run "$LAUNCH/node$node.sh" "$@"
