# `make demo` and `make test` each set up .venv from nothing; a second call starts at once.
#
#   PYTHON      the interpreter that .venv is made from (3.10 or newer)
#   TORCH_SPEC  what pip installs as torch, before everything else, so that no other build of it comes in as a dependency:
#               make test TORCH_SPEC=torch==2.11.0
#   CONSTRAINTS the file with the versions of all other packages that the tests run with; CONSTRAINTS= for the newest (in another
#               VENV, or after make clean)
#   VENV_FLAGS  e.g. --system-site-packages, to use a torch >= 2.11 that is already installed (with TORCH_SPEC='torch>=2.11')
#   JOBS        how many processes run the tests (each file in one of them; all of DeepSpeed's in the same one): one more than
#               cores, for tests wait for other processes now and then
#   ARGS        further arguments: make demo ARGS="--link 1gbit", make test ARGS="-k timeline"

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH_SPEC ?= torch==2.13.0
TIMM_SPEC ?= timm==1.0.31
CONSTRAINTS ?= tests/constraints.txt
JOBS ?= 3
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_DEV := $(VENV)/.installed-dev
STAMP_SWEEP := $(VENV)/.installed-sweep
CODE := commfuse_dp integrations examples tests benchmarks
# With bytecode kept, whatever the shell says: else each of the many processes compiles all modules, and pytest rewrites all tests.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --max-worker-restart 0

.PHONY: demo test test-slow test-all sweep peer-suites bench bench-tp gpu-check lint format constraints clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/commfuse demo $(ARGS)

# Every claim of the README. Files and tests come in an order drawn anew each time; the head of the output says how to have the
# same again: make test ARGS="--randomly-seed=..."
test: $(STAMP_DEV)
	$(PYTEST) -m "not slow" $(ARGS)

# What test-all has beyond test: more cells of the same tables, whole programs, everything that compiles.
test-slow: $(STAMP_SWEEP)
	$(PYTEST) -m slow $(ARGS)

test-all: $(STAMP_SWEEP)
	$(PYTEST) $(ARGS)

# Every architecture of transformers and the usual models of timm, with and without PEFT, against stock FSDP2; a row for each.
# Part of test-all, too.    make sweep ARGS="--only '^timm'"
sweep: $(STAMP_SWEEP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity.sweep $(ARGS)

# The frameworks' own tests against CommFuse, from checkouts of the versions that are installed.
#   make peer-suites PYTORCH=../pytorch DEEPSPEED=../DeepSpeed      make peer-suites PYTORCH=../pytorch ARGS="--files training"
peer-suites: $(STAMP_SWEEP)
	$(BIN)/python -m tests.tools.peer_suites $(if $(PYTORCH),--pytorch $(PYTORCH)) $(if $(DEEPSPEED),--deepspeed $(DEEPSPEED)) $(ARGS)

bench: $(STAMP_DEV)
	$(BIN)/python benchmarks/train_step.py $(ARGS)

# The paper's table: tensor-parallel layers over a shaped link.  make bench-tp ARGS="--op attention --pass both"
bench-tp: $(STAMP_DEV)
	$(BIN)/python benchmarks/tensor_parallel.py $(ARGS)

# Needs a GPU and nothing installed but torch: runs from the checkout with PYTHON, not in .venv.
#   make gpu-check ARGS="--parts kernels_check,timings"      make gpu-check PYTHON=.venv/bin/python
gpu-check:
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m benchmarks.gpu_check $(ARGS)

lint: $(STAMP_DEV)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy commfuse_dp integrations examples

format: $(STAMP_DEV)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# The newest versions that go together, for every Python and platform; $(CONSTRAINTS) says why without those that come with torch.
constraints: $(STAMP)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra sweep --no-header --no-annotate pyproject.toml > $(VENV)/newest.txt
	grep '^#' tests/constraints.txt > $(VENV)/constraints.txt
	grep -vE '^(torch|triton|nvidia-.*|cuda-(toolkit|bindings|pathfinder)|setuptools|sympy|mpmath|networkx|jinja2|markupsafe|fsspec|filelock|commfuse-dp)==' \
		$(VENV)/newest.txt >> $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt tests/constraints.txt

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH_SPEC)"
	$(BIN)/python -m pip install --quiet --editable ".[plot]"
	touch $@

# What the tests and the comparisons need besides: DeepSpeed, Accelerate, Transformers, MPI, linters.
$(STAMP_DEV): $(STAMP) $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) --editable ".[dev]"
	touch $@

# What test-all, sweep and peer-suites need besides. torch stays as it is; timm comes alone, see tests/support/timm_alone.py.
$(STAMP_SWEEP): $(STAMP_DEV)
	$(BIN)/python -c 'import torch; print("torch==" + torch.__version__)' > $(VENV)/torch.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/torch.txt $(addprefix --constraint ,$(CONSTRAINTS)) --editable ".[sweep]"
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/timm "$(TIMM_SPEC)"
	touch $@

clean:
	rm -rf $(VENV) build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
