# Every target makes .venv first when it is missing or older than what it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test test-slow lint format benchmark benchmark-emulator clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  PYTHON=...      the interpreter that .venv is made with (python3)"

# The stamp is touched last: an interrupted install leaves none, and the next make starts over.
# --clear, because half an installed package is worse than none.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

train: $(STAMP)  ## run the main job; flags go in ARGS="--mode sync ..."
	$(BIN)/adapipe train $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint  ## lint, types and the tests
	OMP_NUM_THREADS=1 $(BIN)/pytest $(ARGS)

test-slow: $(STAMP)  ## the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow $(ARGS)

format: $(STAMP)  ## format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

benchmark: $(STAMP)  ## the throughput figures of the README
	$(BIN)/python benchmarks/throughput.py $(ARGS)

benchmark-emulator: $(STAMP)  ## the emulator against reality, and what it costs
	$(BIN)/python benchmarks/emulator.py $(ARGS)

clean:  ## remove .venv, caches and build leftovers; never results
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
