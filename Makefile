# Needs make and Python 3.11 or newer; everything else goes into .venv and .venv-demo.
# A target's stamp file remembers what was installed, so a second run starts at once.

PYTHON ?= python3
# Where an index offers builds with and without CUDA, this choice decides about several
# gigabytes: set it, or PIP_EXTRA_INDEX_URL, to what fits the machine.
TORCH ?= torch==2.13.0
# Test processes per backend. More than the number of cores only slows them down.
WORKERS ?= 2
# How long `make fuzz` draws on each backend.
MINUTES ?= 10
PYTEST_ARGS ?=

VENV := .venv
DEMO := .venv-demo
BIN := $(VENV)/bin
SOURCES := keras_attn tests examples benchmarks docs conftest.py

# One thread a process: two workers with two threads each are slower than with one.
SINGLE := OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1 TF_CPP_MIN_LOG_LEVEL=2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-tensorflow test-jax test-torch fuzz lint format docs install clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO)/stamp ## Train a ViT on real digits, export it, show its attention (TensorFlow only)
	KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=2 $(DEMO)/bin/python examples/vit_digits.py

test: test-tensorflow test-jax test-torch ## Run the tests on all three backends, one after the other

test-tensorflow: $(VENV)/stamp-test ## Run the tests on TensorFlow
test-jax: $(VENV)/stamp-test ## Run the tests on JAX
test-torch: $(VENV)/stamp-test ## Run the tests on torch
test-tensorflow test-jax test-torch: test-%:
	@echo "==> tests on $*"
	$(SINGLE) KERAS_BACKEND=$* $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

fuzz: $(VENV)/stamp-test ## Draw attention layers for MINUTES on each backend, against the oracle
	$(foreach backend,tensorflow jax torch,$(SINGLE) KERAS_BACKEND=$(backend) $(BIN)/python tests/fuzz.py --minutes $(MINUTES) &&) true

lint: $(VENV)/stamp-lint ## Check format, lint and the floors of the house
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

format: $(VENV)/stamp-lint ## Format, and mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/stamp-docs ## Build the site into site/, warnings are errors
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=true mkdocs build --strict

install: $(VENV)/stamp-test ## Install all three backends and the tests' needs into .venv

clean: ## Remove what was built; virtual environments too
	rm -rf $(VENV) $(DEMO) site out build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python $(DEMO)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed. Received: {v[0]}.{v[1]} ({sys.executable}). Say which: make PYTHON=python3.12")'
	@echo "==> creating $(@D:/bin=)"
	$(PYTHON) -m venv $(@D:/bin=)

$(VENV)/stamp-lint: pyproject.toml | $(VENV)/bin/python
	@echo "==> installing the linters"
	$(BIN)/python -m pip install --quiet -e ".[lint]"
	@touch $@

$(VENV)/stamp-docs: pyproject.toml | $(VENV)/bin/python
	@echo "==> installing what the site needs"
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	@touch $@

$(VENV)/stamp-test: pyproject.toml | $(VENV)/bin/python
	@echo "==> installing TensorFlow, JAX, torch and what the tests need (about 1 GB to download; minutes)"
	$(BIN)/python -m pip install -e ".[dev,tensorflow,jax,torch,nlp,export,plot,real]" "$(TORCH)"
	@touch $@

$(DEMO)/stamp: pyproject.toml | $(DEMO)/bin/python
	@echo "==> installing Keras, TensorFlow and what the demo needs (about 400 MB to download)"
	$(DEMO)/bin/python -m pip install -e ".[demo]"
	@touch $@
