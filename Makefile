# Everything runs in .venv, which the first target creates: Python 3.11 or newer, make and bash are
# enough. A stamp file says that the extras of a target are installed, so a second run is instant.
# Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt finwhale/__init__.py
# Extra pytest arguments, for instance: make test ARGS="-k layer_table"
ARGS   ?=
# `make coverage` sets this to "coverage run -m pytest".
PYTEST ?= pytest

export OMP_NUM_THREADS = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PYTHONHASHSEED = 0

.PHONY: help demo demo-train test test-full test-browser test-clients coverage check golden bench \
  attack fuzz format clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo "make demo       talk to the shipped model (under a minute on two cores, once installed)"
	@echo "make demo-train train, save and load a small model (about five minutes, two cores)"
	@echo "make test       the fast tests (at most eight minutes on two cores)"
	@echo "make test-full  the slow ones as well"
	@echo "make coverage   the fast tests with line coverage by room"
	@echo "make test-browser  the chat page in a headless Chromium, and attacked there"
	@echo "make test-clients  other people's client libraries against the shipped model"
	@echo "make attack     5,000 hostile bodies at the server, and how long it stood still"
	@echo "make fuzz       10,000 requests from the server's own description"
	@echo "make check      lint, format, types, import contracts, sizes"
	@echo "make golden     regenerate stored answers; review the diff"
	@echo "make bench      timings as JSON lines"
	@echo "make format     rewrite sources in the house format"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "finwhale needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Compiling is part of the installation: half a minute that the first demo would spend otherwise.
$(VENV)/.with-demo: $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[text,cli,chat,engine]"
	$(BIN)/python -m tests.compile_kernels
	@touch $@

$(VENV)/.with-demo-train: $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[text,cli]"
	@touch $@

$(VENV)/.with-test: $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[text,cli,test]"
	@touch $@

$(VENV)/.with-dev: $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[text,cli,test,dev]"
	@touch $@

demo: $(VENV)/.with-demo
	$(BIN)/finwhale demo $(ARGS)

# An interrupted run goes on where it stopped; "rm -r runs/demo" starts afresh.
demo-train: $(VENV)/.with-demo-train
	$(BIN)/finwhale demo-train --resume $(ARGS)

test: $(VENV)/.with-test
	$(BIN)/python -m tests.compile_kernels
	$(BIN)/python -m $(PYTEST) -n 2 --timeout 60 -m "not slow and not gpu and not oracle_env" $(ARGS)

# Lines covered by `make test`, by room; fails below the floor.
coverage: $(VENV)/.with-test
	rm -rf build/ci .coverage .coverage.*
	mkdir -p build/ci
	$(MAKE) test PYTEST="coverage run -m pytest" ARGS="--junitxml=build/ci/junit.xml -q $(ARGS)"
	$(BIN)/python .ci/report.py build/ci/junit.xml --coverage

# Slow tests train and save whole models, so their limit is ten minutes each.
test-full: $(VENV)/.with-test
	$(BIN)/python -m tests.compile_kernels
	$(BIN)/python -m $(PYTEST) -n 2 --timeout 600 -m "not gpu and not oracle_env" $(ARGS)

# The chat page in a headless Chromium, which has to be installed already (docs/server.md).
test-browser: $(VENV)/.with-test
	$(BIN)/python -m pip install --quiet playwright
	$(BIN)/python -m pytest tests/e2e/chat_page_in_browser.py tests/e2e/chat_page_under_attack.py \
	  --timeout 600 $(ARGS)

# Other people's client libraries, in environments of their own; those of npm where node is.
CLIENTS := build/clients
CLIENT_TESTS := -m pytest --noconftest -p tests.foreign_server --timeout 300 $(ARGS)

test-clients: export FINWHALE_PYTHON = $(BIN)/python
test-clients: export FINWHALE_NODE_MODULES = $(CLIENTS)/node
test-clients: $(VENV)/.with-test $(CLIENTS)/.with-clients $(CLIENTS)/.with-inspect
	$(BIN)/python -m tests.compile_kernels
	$(CLIENTS)/clients/bin/python $(CLIENT_TESTS) tests/e2e/foreign_clients.py
	$(CLIENTS)/inspect/bin/python $(CLIENT_TESTS) tests/e2e/foreign_inspect.py

$(CLIENTS)/.with-%: tests/e2e/foreign_%.txt tests/e2e/foreign_clients.json | $(BIN)/python
	$(BIN)/python -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/python -m pip install --quiet -r $<
	mkdir -p $(CLIENTS)/node && cp tests/e2e/foreign_clients.json $(CLIENTS)/node/package.json
	! command -v npm >/dev/null || npm --prefix $(CLIENTS)/node install --silent --no-audit
	@touch $@

check: $(VENV)/.with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --summarize-errors
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python .ci/check_tree.py

golden: $(VENV)/.with-test
	$(BIN)/python tests/golden/write_help_texts.py
	PYTHON=$(abspath $(BIN)/python) bash tests/oracles/regenerate.sh

# What a CPU tells in minutes; bench/README.md has the rest.
bench: $(VENV)/.with-test
	$(BIN)/python bench/decode.py
	$(BIN)/python bench/engine.py --preset nano --parts concurrency first
	$(BIN)/python bench/engine_memory.py

# Twenty minutes on two cores that nobody else uses; another checkout: make attack ARGS="--tree DIR".
attack: $(VENV)/.with-test
	$(BIN)/python -m tests.compile_kernels
	$(BIN)/python bench/hostile_load.py $(ARGS)

# Installs schemathesis into build/fuzz-venv at its first run.
fuzz: $(VENV)/.with-test
	$(BIN)/python -m tests.compile_kernels
	$(BIN)/python bench/fuzz_api.py $(ARGS)

format: $(VENV)/.with-dev
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .coverage* runs build dist
