set -euo pipefail
@unpack@unpack inference ROLLMILL_KEYS_INFERENCE
unset ROLLMILL_KEYS_INFERENCE
export ROLLMILL_KEYS="$HOME/rollmill-keys" RUN_DIR="$PWD/runs/@run@" @ports@
exec .venv/bin/python -m services.cli start @arguments@ --replica-id "@name@-$(hostname)"
