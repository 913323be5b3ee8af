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

# What is computed or served runs two files at a time; whatever trains has the machine to itself. Both run in any case.
COMPUTED := tests/unit tests/sim
BESIDE := $(COMPUTED) tests/contract tests/service
PAIRED := --numprocesses 2 --dist loadfile

test: $(STAMP)  ## Every test.
	$(BIN)/python -m pytest $(BESIDE) $(PAIRED); beside=$$?; \
	$(BIN)/python -m pytest $(BESIDE:%=--ignore=%) --durations 12 && exit $$beside

soak: $(STAMP)  ## Hundreds of random faults on one job, compared with its undisturbed twin.
	$(BIN)/python -m benchmarks.chaos --json --faults 200

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint  ## The fast gate, a minute or two.
	$(BIN)/python -m pytest $(COMPUTED) $(PAIRED)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
