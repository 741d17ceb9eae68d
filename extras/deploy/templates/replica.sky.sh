set -euo pipefail
{% include "unpack.sky.sh" %}
unpack inference ROLLMILL_KEYS_INFERENCE
unset ROLLMILL_KEYS_INFERENCE
export ROLLMILL_KEYS="$HOME/rollmill-keys" RUN_DIR="$PWD/runs/{{ run }}" {{ ports.items() | map("join", "=") | join(" ") }}
exec .venv/bin/python -m services.cli start {{ arguments }} --replica-id "{{ name }}-$(hostname)"
