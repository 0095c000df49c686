# Targets: demo (installs only what a user needs), setup (what the others share), test, test-slow (the rest of the tests).
# Each may be run again; what is done is skipped. `make coverage` runs all tests and prints the lines and branches of src
# that they reach.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Some tests mostly wait, so one worker more than there are cores.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
STAMP := $(VENV)/.penstock-installed
USER_STAMP := $(VENV)/.penstock-for-users
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Make two targets that install (`make -j demo test`) one after the other: they share the virtual environment.
.NOTPARALLEL:
.PHONY: setup demo test test-slow lint coverage

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	touch $(STAMP) $(USER_STAMP)

# --no-compile: Python compiles the few modules that it imports, not all of torch.
$(USER_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[report]'
	touch $(USER_STAMP)

demo: $(USER_STAMP)
	$(BIN)/penstock train

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) -m "not slow"

test-slow: setup
	$(PYTEST) --no-loadscope-reorder -m slow

coverage: setup
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist loadfile
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report
