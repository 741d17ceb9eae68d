#!/usr/bin/env bash
# Start an inference service and join a run: inference.sh NAME HOST:PORT
# Variables: OMP_NUM_THREADS (1), CUDA_VISIBLE_DEVICES.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python}" -m services.inference --name "${1:?usage: inference.sh NAME HOST:PORT}" \
  --orchestrator "${2:?usage: inference.sh NAME HOST:PORT}"
