#!/usr/bin/env bash
# Start the environment gateway of a run: envgateway.sh RUN_DIR
set -euo pipefail
exec "${PYTHON:-python}" -m services.envgateway --run-dir "${1:?usage: envgateway.sh RUN_DIR}"
