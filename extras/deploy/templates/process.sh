#!/usr/bin/env bash
# Starts {{ name }} of {{ layout.path }}, which belongs to node {{ node }}.
{% include "scripts.head" %}
set -euo pipefail
cd "${ROLLMILL_HOME:-.}"
export {{ layout.ports.items() | map("join", "=") | join(" ") }}
exec "${PYTHON:-python}" -m services.cli start {{ arguments }} "$@"
