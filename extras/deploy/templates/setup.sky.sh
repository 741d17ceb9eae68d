{//# Packages at the versions of the images. Servers have pins of their own, so each has an environment of its own. uv would
     take the pins of pyproject.toml: --no-config. #}
{% set pip = "python3 -m uv pip install --quiet --no-config" %}
{% set venv = "python3 -m uv venv --quiet --allow-existing" %}
set -euo pipefail
python3 -m pip install --quiet uv
{{ venv }} --python 3.11 .venv
{{ pip }} --python .venv/bin/python --constraint constraints.txt --editable '.[{{ extras | join(",") }}]'
{% for engine, pins in (("sglang", "deploy/docker/inference-sglang.constraints.txt"), ("vllm", "extras/vllm/server/constraints.txt")) if engine in engines %}
{{ venv }} --python 3.12 .venv-{{ engine }}
{{ pip }} --python .venv-{{ engine }}/bin/python --constraint {{ pins }} '.[inference,{{ engine }}]'
touch .venv-{{ engine }}/{{ complete }}
{% endfor %}
