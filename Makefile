# `make demo` and `make test` each set up .venv from nothing; a second call starts at once.
#
#   PYTHON      the interpreter that .venv is made from (3.10 or newer)
#   TORCH_SPEC  what pip installs as torch, before everything else, so that no other build of it comes in as a dependency:
#               make test TORCH_SPEC=torch==2.11.0
#   VENV_FLAGS  e.g. --system-site-packages, to use a torch >= 2.11 that is already installed (with TORCH_SPEC='torch>=2.11')
#   JOBS        how many processes run the tests (each file in one of them)
#   ARGS        further arguments: make demo ARGS="--link 1gbit", make test ARGS="-k timeline"

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH_SPEC ?= torch==2.13.0
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_DEV := $(VENV)/.installed-dev
CODE := commfuse_dp integrations tests benchmarks

.PHONY: demo test test-all bench gpu-check lint format clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/commfuse demo $(ARGS)

test: $(STAMP_DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(ARGS)

test-all: $(STAMP_DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

bench: $(STAMP_DEV)
	$(BIN)/python benchmarks/train_step.py $(ARGS)

# Needs a GPU and nothing installed but torch: runs from the checkout with PYTHON, not in .venv.
#   make gpu-check ARGS="--parts kernels_check,timings"      make gpu-check PYTHON=.venv/bin/python
gpu-check:
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m benchmarks.gpu_check $(ARGS)

lint: $(STAMP_DEV)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy commfuse_dp integrations

format: $(STAMP_DEV)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH_SPEC)"
	$(BIN)/python -m pip install --quiet --editable ".[plot]"
	touch $@

# What the tests and the comparisons need besides: DeepSpeed, Accelerate, Transformers, MPI, linters.
$(STAMP_DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
