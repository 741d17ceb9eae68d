#!/usr/bin/env bash
# Tests against the true SGLang server: makes its environment, sees whether a server starts there, runs the tests.
# Where it cannot be installed or started the last line says "SGLang not exercised" with the reason: skipped, not passed.
# usage: tests/sglang/stage.sh PYTHON SGLANG_ENVIRONMENT
set -uo pipefail
python=$1
environment=$2
log=$(mktemp)
trap 'rm -f "$log"' EXIT

skip() { # REASON
  tail -n 30 "$log" >&2
  echo "SGLang not exercised: $1"
  exit 0
}

reason() { # of what is in the log: its last error, or its last line
  { grep -iE '(error|no matching|no space)' "$log" | grep -v '^make' || tail -n 1 "$log"; } | tail -n 1
}

if ! "${MAKE:-make}" --no-print-directory sglang-env >"$log" 2>&1; then
  skip "its environment cannot be made here: $(reason)"
fi
if ! "$python" -m tests.sglang.probe "$environment/bin/python" >"$log" 2>&1; then
  skip "its server does not start here: $(reason)"
fi
# One server at a time: each has three processes, which would take turns on few cores.
MILLRACE_SGLANG_PYTHON=$(realpath --no-symlinks "$environment/bin/python")
export MILLRACE_SGLANG_PYTHON
"$python" -m pytest -q -m sglang --durations=10 "${@:3}"
