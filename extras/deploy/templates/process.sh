#!/usr/bin/env bash
# {{ what }}
# Written, not edited: {{ written_by }} -o DIR
# Variables: {{ variables }}.
set -euo pipefail
cd "${ROLLMILL_HOME:-.}"
export {{ ports }}
exec "${PYTHON:-python}" -m services.cli start {{ arguments }} "$@"
