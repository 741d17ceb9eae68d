set -euo pipefail
@unpack@nodes=(@nodes@)
roles=(@roles@)
node="${nodes[$SKYPILOT_NODE_RANK]}"
NODE_0="$(head -n 1 <<<"$SKYPILOT_NODE_IPS")"
export PYTHON="$PWD/.venv/bin/python" RUN_DIR="${RUNS:-$PWD/runs}/@run@"
.venv/bin/python -m services.cli deploy @arguments@ -o build/launch
@keys@if [ "$node" = 0 ]; then
  @node_0_host@exec build/launch/node0.sh
fi
export ORCHESTRATOR_HOST_EXTERNAL="$NODE_0" RUN_DIR="$RUN_DIR-node$node"
exec "build/launch/node$node.sh"
