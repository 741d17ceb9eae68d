#!/usr/bin/env bash
# Run programs for judge APIs and environment gateways, on any node: judge_worker.sh [RECIPE]
# A RECIPE's section envgateway gives the limits; without one they are Code Judge's. SIGTERM ends it gently.
# Variables: REDIS_URI (or REDIS_URL; required), MAX_WORKERS (CPUs it may use), MAX_EXECUTION_TIME (10 s), MAX_MEMORY (512 MiB),
#   REDIS_KEY_PREFIX (rollmill), ALLOW_PLAIN_REDIS (1: Redis on another machine without TLS), ALLOW_TIER_0 (1: no isolation).
set -euo pipefail
: "${REDIS_URI:=${REDIS_URL:?set REDIS_URI to the Redis of the judge, such as redis://127.0.0.1:6379}}"
export REDIS_URI OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python}" -P "$(dirname "$0")/../../services/start.py" extras.farm ${1:+--recipe "$1"}
