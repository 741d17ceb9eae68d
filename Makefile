# One command per check, the same for people, hooks and CI. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed
STAMP := $(VENV)/.installed-dev
ENVS := $(VENV)/.installed-envs
INTEGRATIONS := $(VENV)/.installed-integrations
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --build-constraint constraints.txt
SGLANG := .venv-sglang
VLLM := .venv-vllm
VERIFIERS := .venv-verifiers
RACE := .venv-race
SKYPILOT := .venv-skypilot
# One OpenMP thread per process: several small processes share the cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
# Tests start hundreds of processes; each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
UNEXERCISED := $(VENV)/.not-exercised
SKIPPED := $(VENV)/.skipped
FAILED := $(VENV)/.failed
RECIPE ?= recipes/quickstart
SEED ?= 1

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## make .venv with what the project and its tests need; no compiler

install-envs: $(ENVS) ## add ALFWorld, TextWorld, WebShop's tagger and a redis-server (compiler, cmake)

$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 15) else "Rollmill needs Python 3.11 to 3.14; name one with make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip
	@# torch first, alone: then no other package pulls a build with CUDA.
	$(PIP) torch
	$(PIP) --editable '.[orchestrator,inference,trainer,envgateway,plot]'
	@touch $@

$(STAMP): $(RUNTIME)
	$(PIP) --editable '.[dev]'
	@touch $@

$(ENVS): $(STAMP)
	@command -v c++ >/dev/null || { echo "make install-envs needs a C++ compiler: apt-get install g++" >&2; exit 1; }
	@# The build of ALFWorld's planner calls `python`, which a fresh Debian lacks.
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --editable '.[envs]'
	@touch $@

install-integrations: $(INTEGRATIONS) ## add W&B, trackio, OpenTelemetry, PEFT, Anthropic's client, MCP, reasoning-gym and gymnasium, which tests use

$(INTEGRATIONS): $(STAMP)
	$(PIP) --editable '.[integrations]'
	@touch $@

extra: $(RUNTIME) ## add the packages of EXTRA=mcp, wandb, gymnasium, ... (pyproject.toml) to .venv
	$(PIP) --editable '.[$(EXTRA)]'

install-verifiers: $(VERIFIERS)/.installed ## make .venv-verifiers: the package verifiers, whose pins exclude ours

$(VERIFIERS)/.installed: extras/hub/verifiers/constraints.txt
	$(PYTHON) -m venv --clear $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< verifiers
	@touch $@

lock: ## resolve every version that make installs, newest first, into constraints.txt
	$(PYTHON) -m venv --clear $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	@# pip installs, setuptools and cmake build: no package requires them.
	printf 'pip\nsetuptools\ncmake\n' | $(VENV)-lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
		--extra dev --extra envs --extra integrations --extra docs --no-annotate --custom-compile-command 'make lock' --output-file constraints.txt pyproject.toml -
	rm -rf $(VENV)-lock

quickstart: $(RUNTIME) ## set up, train the calculator for a few minutes, draw the reward curve
	$(BIN)/rollmill run recipes/quickstart --set run.seed=$(SEED) --json

run: $(RUNTIME) ## run RECIPE=recipes/...
	$(BIN)/rollmill run $(RECIPE)

# More workers than cores: tests wait for processes and deadlines more than they compute. Tests of one file share fixtures
# and runs, so they stay on one worker; tests/order.py has the files that take longest begin first.
TESTS := $(BIN)/python -m pytest -q -n 5 --dist loadfile --no-loadscope-reorder

test: $(STAMP) ## set up and run every test
	@# The = keeps pytest from taking the file, once it is there, for the place of the tests.
	@rm -f $(UNEXERCISED) $(FAILED)
	$(TESTS) -m 'not gpu and not recipes and not sglang and not vllm' --not-exercised-to=$(UNEXERCISED) --failed-to=$(FAILED) \
		|| $(BIN)/python -m tests.failed_alone $(FAILED)
	@$(BIN)/python -m tests.not_exercised $(UNEXERCISED)

test-skipped: $(STAMP) ## run the tests that the last make test skipped, once their needs are installed
	@rm -f $(FAILED)
	@$(BIN)/python -m tests.not_exercised --names $(UNEXERCISED) >$(SKIPPED)
	@# Without a name pytest would run every test.
	[ ! -s $(SKIPPED) ] || $(TESTS) @$(SKIPPED) --failed-to=$(FAILED) || $(BIN)/python -m tests.failed_alone $(FAILED)

test-fast: $(STAMP) ## the tests that take seconds
	$(TESTS) -m 'not slow and not gpu and not recipes and not sglang and not vllm'

test-recipes: $(STAMP) ## run every recipe's whole loop with --profile tiny, one after another
	@rm -f $(FAILED)
	$(BIN)/python -m pytest -q -m recipes --failed-to=$(FAILED) || $(BIN)/python -m tests.failed_alone $(FAILED)

test-gpu: $(STAMP) ## the tests that need a GPU
	$(BIN)/python -m pytest -q -m gpu

gpu-kit: $(STAMP) ## pack what benchmarks/gpu_kit.py needs on a GPU machine without a package index
	$(BIN)/python benchmarks/gpu_kit.py --pack build/gpu-kit

# Servers of engines, each in an environment of its own: their pins exclude this project's. The file .complete, at the end of an
# install, is what `rollmill` looks for: an environment without it is not taken (services/inference/engine/served/process.py).
sglang-env: $(SGLANG)/.complete ## make .venv-sglang: SGLang for NVIDIA GPUs (Python 3.11 to 3.13, about 12 GB)
vllm-env: $(VLLM)/.complete ## make .venv-vllm: vLLM for NVIDIA GPUs (Python 3.11 to 3.13, about 12 GB)
$(SGLANG)/.complete: deploy/docker/inference-sglang.constraints.txt
$(VLLM)/.complete: extras/vllm/server/constraints.txt

$(SGLANG)/.complete $(VLLM)/.complete: $(VENV)%/.complete:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "the servers have wheels for Python 3.11 to 3.13; name one with PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< $(*:-%=%)
	@$(@D)/bin/python -c 'import sys, torch; sys.exit(0 if torch.version.cuda else f"pip took torch {torch.__version__}, which is built for CPUs: unset PIP_FIND_LINKS and PIP_EXTRA_INDEX_URL")'
	@touch $@

# On a CPU, for tests. torch with what it needs, because the package index has its build for CUDA; the rest without, because
# the servers' own requirements are for CUDA.
sglang-cpu-env: $(SGLANG)-cpu/.complete ## make .venv-sglang-cpu: the true SGLang server on a CPU, with a stand-in for its kernels
vllm-cpu-env: $(VLLM)-cpu/.complete ## make .venv-vllm-cpu: the true vLLM server on a CPU
race-env: $(RACE)/.complete ## make .venv-race: TRL on a CPU, the other side of benchmarks/race.py
$(SGLANG)-cpu/.complete: extras/sglang/server/requirements.txt
$(VLLM)-cpu/.complete: extras/vllm/server/requirements.txt
$(RACE)/.complete: benchmarks/race_requirements.txt

$(SGLANG)-cpu/.complete $(VLLM)-cpu/.complete $(RACE)/.complete:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< torch
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@$(@D)/bin/python -c 'import torch'
	@touch $@

test-sglang: $(STAMP) ## the tests that need the true SGLang server, on a CPU
	@tests/server_stage.sh SGLang $(BIN)/python $(SGLANG)-cpu

test-vllm: $(STAMP) ## the tests that need the true vLLM server, on a CPU
	@tests/server_stage.sh vLLM $(BIN)/python $(VLLM)-cpu

test-skypilot: $(STAMP) $(SKYPILOT)/.installed ## the tests that need SkyPilot, in an environment of its own
	ROLLMILL_SKYPILOT_PYTHON=$(CURDIR)/$(SKYPILOT)/bin/python ROLLMILL_REQUIRE=skypilot $(BIN)/python -m pytest -q extras/deploy/tests/test_clusters.py

$(SKYPILOT)/.installed:
	$(PYTHON) -m venv $(SKYPILOT)
	$(SKYPILOT)/bin/python -m pip install --quiet --disable-pip-version-check skypilot==0.14.1
	@touch $@

lint: $(STAMP) ## ruff, mypy, import-linter, buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos

format: $(STAMP) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write protos

protos: $(STAMP) ## compile the protos into services/common/pb
	$(BIN)/python protos/generate.py

bench: $(STAMP) ## run every benchmark briefly, one after another; those that failed are named at the end
	@$(BIN)/python benchmarks/_run_all.py --quick

chaos: $(STAMP) ## kill, stop, flip and cut everything in a small run for 15 minutes, and audit what is left
	@$(BIN)/python benchmarks/chaos.py

race: $(STAMP) race-env ## run what is missing of docs/race.md, Rollmill and TRL in turns on two cores, and draw it
	$(BIN)/python benchmarks/race.py

profile: $(STAMP) ## run RECIPE=recipes/... and say where its time goes, per process and per stage
	$(BIN)/python benchmarks/where_time_goes.py $(RECIPE)

study: $(STAMP) ## measure what is missing of docs/study.md, an hour or two in all on one core, and draw it
	$(BIN)/python benchmarks/study.py

docs: $(VENV)/.installed-docs ## build the documentation into build/site; a warning or a broken link is an error
	@# The theme announces its own end of life on each run.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.installed-docs: $(RUNTIME)
	$(PIP) --editable '.[docs]'
	@touch $@

clean: ## remove the virtual environments, caches and runs
	rm -rf $(VENV) $(SGLANG) $(VLLM) $(SGLANG)-cpu $(VLLM)-cpu $(VERIFIERS) $(RACE) $(SKYPILOT) runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.PHONY: help install extra install-integrations install-verifiers quickstart run test test-skipped test-fast test-recipes test-gpu gpu-kit sglang-env vllm-env sglang-cpu-env vllm-cpu-env test-sglang test-vllm test-skypilot lint format protos bench chaos race-env race profile study docs clean
