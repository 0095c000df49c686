# Targets: setup (what the others share), demo, test, test-slow (the rest of the tests). Each may be run again; what is done
# is skipped. `make docs` builds docs/_build/html/index.html. `make coverage` runs all tests and prints the lines and branches of src that they reach.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Some tests mostly wait, so one worker more than there are cores.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
STAMP := $(VENV)/.penstock-installed

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: setup demo test test-slow lint docs coverage

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/penstock train

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) -m "not slow"

test-slow: setup
	$(PYTEST) --no-loadscope-reorder -m slow

docs: setup
	$(BIN)/python -m sphinx -b html -W --keep-going -n docs docs/_build/html

coverage: setup
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist loadfile
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report
