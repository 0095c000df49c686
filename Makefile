# Targets: demo (installs only what a user needs), setup (what test needs), test (lint, types, the fast tests), setup-ci (what all
# tests need), test-slow (processes, faults, browsers, recipes), test-all (the rest of the products of parameters; PART=0/6
# runs a sixth), docs (builds docs/_build/html/index.html). Each may be run again; what is done is skipped. `make coverage` runs all
# tests and prints the lines and branches of src that they reach (COVERED='-m "not slow"': those of the fast tests), `make report` the
# size of src.
# The workflows use the others: test-fast (test without lint), test-threads (those for macOS), types (checks types for a newer
# Python and for macOS). CONSTRAINTS=constraints-oldest.txt installs the oldest versions instead.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Some tests mostly wait, so one worker more than there are cores.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
CONSTRAINTS ?= constraints.txt
# Touched once what it is named after is installed, and with it what that contains.
FOR_USERS := $(VENV)/.penstock-for-users
FOR_TESTS := $(VENV)/.penstock-for-tests
FOR_DOCS := $(VENV)/.penstock-for-docs
FOR_CI := $(VENV)/.penstock-for-ci
# --no-compile: Python compiles the few modules that it imports, not all of torch.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)

# Images for containers often set it. Every process would then compile torch anew: 5 s instead of 2 to import it.
unexport PYTHONDONTWRITEBYTECODE

# Tests of ranks as threads and of what needs no torch: those that run on macOS, too.
THREADS := $(addprefix tests/,plan profile schedule show simulate stage trace project) $(addprefix tests/runtime/,model \
	test_autocast.py test_conversion.py test_dropped.py test_equality.py test_gradient_kinds.py test_loss_state.py \
	test_no_graph.py test_options.py test_pipeline.py test_recompute.py)

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Make two targets that install (`make -j demo test`) one after the other: they share the virtual environment.
.NOTPARALLEL:
.PHONY: setup setup-ci demo test test-fast test-slow test-all test-threads lint types docs coverage report

setup: $(FOR_TESTS)

setup-ci: $(FOR_CI)

$(FOR_USERS) $(FOR_TESTS) $(FOR_DOCS) $(FOR_CI): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[$(EXTRAS)]'
	touch $(HAS) $@

$(FOR_USERS): EXTRAS := report
$(FOR_TESTS): EXTRAS := dev
$(FOR_TESTS): HAS := $(FOR_USERS)
$(FOR_DOCS): EXTRAS := docs
$(FOR_DOCS): HAS := $(FOR_USERS)
$(FOR_CI): EXTRAS := dev,docs,ci
$(FOR_CI): HAS := $(FOR_USERS) $(FOR_TESTS) $(FOR_DOCS)

demo: $(FOR_USERS)
	$(BIN)/penstock train

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

types: setup
	$(BIN)/mypy --python-version 3.14
	$(BIN)/mypy --platform darwin --no-warn-unreachable

# As `make lint`, but mypy, which is one process, runs beside the tests; what it found comes last.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "$(BIN)/mypy beside the tests"; \
	$(BIN)/mypy > $(VENV)/mypy.txt & mypy=$$!; \
	$(PYTEST) -m "not slow"; tests=$$?; \
	wait $$mypy; types=$$?; \
	cat $(VENV)/mypy.txt; \
	exit $$((tests | types))

test-fast: setup
	$(PYTEST) -m "not slow"

test-threads: setup
	$(PYTEST) -m "not slow" $(THREADS)

test-slow: setup-ci
	$(PYTEST) --no-loadscope-reorder -m "slow and not exhaustive"

test-all: setup-ci
	$(PYTEST) --no-loadscope-reorder -m exhaustive $(if $(PART),--part $(PART))

docs: $(FOR_DOCS)
	$(BIN)/python -m sphinx -b html -W --keep-going -n docs docs/_build/html

coverage: setup-ci
	$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist loadfile $(COVERED); tests=$$?; \
	$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report; report=$$?; \
	exit $$((tests | report))

report: setup
	$(BIN)/python -m tools.house
