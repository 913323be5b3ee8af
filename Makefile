# Every target does its own set-up: `make demo` and `make test` work on a machine with Python 3.11+ and git alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WEB := $(shell find api/web -name node_modules -prune -o -type f -print)

# Node is a PyPI wheel; its npm finds it by the path.
NPM := PATH="$(abspath $(BIN)):$$PATH" npm --prefix api/web

.PHONY: setup demo test soak soak-sim lint lint-python lint-web check format client pins audit clean

setup: $(STAMP)

$(STAMP): pyproject.toml deploy/setup.sh hatch_build.py $(WEB)
	PYTHON=$(PYTHON) VENV=$(VENV) bash deploy/setup.sh
	touch $(STAMP)

demo: $(STAMP)  ## The main job: train, lose a node, recover, get a node back, finish.
	$(BIN)/python -m deploy.demo

# What is computed or served, and ranks no clock is held to, run two files at a time; whatever else trains has the machine
# to itself. Both run in any case.
COMPUTED := tests/unit tests/sim
UNHURRIED := $(patsubst %,tests/integration/test_%.py,collectives forming links probe reach session zygote)
BESIDE := $(COMPUTED) tests/contract tests/service tests/ranks $(UNHURRIED)
PAIRED := --numprocesses 2 --dist loadfile

test: $(STAMP)  ## Every test.
	$(BIN)/python -m pytest $(BESIDE) $(PAIRED); beside=$$?; \
	$(BIN)/python -m pytest $(BESIDE:%=--ignore=%) --durations 12 && exit $$beside

soak: $(STAMP)  ## Hundreds of random faults on one job, compared with its undisturbed twin.
	$(BIN)/python -m benchmarks.chaos --json --faults 200

SEEDS ?= 100000
soak-sim: $(STAMP)  ## The kernel in simulated worlds: every seed a cluster, its jobs and their faults. SEEDS=1000 FIRST=0 for fewer.
	$(BIN)/python -m orchestrator.sim --seeds $(SEEDS) --first $(or $(FIRST),0) --jobs $$(nproc)

lint: lint-python lint-web

lint-python: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lint-web: $(STAMP)
	[ "$${EVERSTEP_SKIP_DASHBOARD:-0}" = 1 ] || $(NPM) run --silent check

check: lint  ## The fast gate, a minute or two.
	$(BIN)/python -m pytest $(COMPUTED) $(PAIRED) -m 'not long'

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

client: $(STAMP)  ## What the dashboard knows of the API, after a change of routes or shapes; and the client that awaits nothing.
	$(BIN)/python -m deploy.sync_client
	$(BIN)/python -m deploy.describe > api/web/openapi.json
	$(NPM) run --silent client

pins: $(STAMP)  ## The versions that the image is built with: those of this environment, once the tests have passed in it.
	$(BIN)/python -m deploy.bom --pins > deploy/constraints.txt

audit: $(STAMP)  ## Asks the advisory databases about those versions and about the page's; needs a network that reaches them.
	$(BIN)/python -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install --quiet pip-audit
	$(VENV)/audit/bin/pip-audit --no-deps --disable-pip --requirement deploy/constraints.txt; python=$$?; \
	$(NPM) audit --audit-level=high && exit $$python

clean:
	rm -rf $(VENV) api/static api/web/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
