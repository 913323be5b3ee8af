# Every target does its own set-up: `make demo` and `make test` work on a machine with Python 3.11+ and git alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test soak lint check format clean

setup: $(STAMP)

$(STAMP): pyproject.toml deploy/setup.sh
	PYTHON=$(PYTHON) VENV=$(VENV) bash deploy/setup.sh
	touch $(STAMP)

demo: $(STAMP)  ## The main job: train, lose a node, recover, get a node back, finish.
	$(BIN)/python -m deploy.demo

test: $(STAMP)  ## Every test.
	$(BIN)/python -m pytest

soak: $(STAMP)  ## Hundreds of random faults on one job, compared with its undisturbed twin.
	$(BIN)/python -m benchmarks.chaos --json --faults 200

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint  ## The fast gate, a minute or two.
	$(BIN)/python -m pytest tests/unit tests/sim

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
