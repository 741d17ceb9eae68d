set -euo pipefail
{% if secrets %}
{% include "unpack.sky.sh" %}
{% endif %}
nodes=({{ layout.nodes | join(" ") }})
roles=({{ layout.roles | map("join", " ") | map("tojson") | join(" ") }})
node="${nodes[$SKYPILOT_NODE_RANK]}"
NODE_0="$(head -n 1 <<<"$SKYPILOT_NODE_IPS")"
export PYTHON="$PWD/.venv/bin/python" RUN_DIR="${RUNS:-$PWD/runs}/{{ run }}"
.venv/bin/python -m services.cli deploy {{ arguments }} -o build/launch
{% if secrets %}
for role in ${roles[$SKYPILOT_NODE_RANK]}; do unpack "$role" "ROLLMILL_KEYS_${role^^}"; done
unset {{ secrets | join(" ") }}
export ROLLMILL_KEYS="$HOME/rollmill-keys"
{% endif %}
if [ "$node" = 0 ]; then
{% if layout.nodes | length > 1 %}
  export NODE_HOST="$NODE_0"
{% endif %}
  exec build/launch/node0.sh
fi
export ORCHESTRATOR_HOST_EXTERNAL="$NODE_0" RUN_DIR="$RUN_DIR-node$node"
exec "build/launch/node$node.sh"
