# `make demo` and `make test` each do all they need: environment, install, run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed
NEWEST := .venv-newest
AUDIT := .venv-audit

.PHONY: help venv demo test test-slow test-all test-faults soak test-newest check audit docs results tables clean

help:
	@echo "make demo        train on the embedded digits and draw what came out (under a minute after the install)"
	@echo "make test        run the fast tests"
	@echo "make test-slow   run the slow tests"
	@echo "make test-all    run all tests"
	@echo "make test-faults damage files, kill commands and federations, generate inputs: a table of what came of it (20 minutes)"
	@echo "make soak        a federation of real parties whose processes are killed at random for 20 minutes"
	@echo "make test-newest build the wheel, install it with the newest of everything but torch, test the command line"
	@echo "make check       ruff, mypy --strict, import-linter"
	@echo "make audit       look up the constraints among known vulnerabilities (needs the network)"
	@echo "make docs        build the documentation into site/"
	@echo "make results     write docs/results.md, docs/paper.md and their figures from the files in results/"
	@echo "make tables      run the methods on seven real tables and write docs/tables.md (about 40 minutes; needs the data)"
	@echo "make clean       remove the environments and what was built"

venv: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,docs]"
	touch $@

demo: $(SETUP)
	$(BIN)/pfedhn demo

test: $(SETUP)
	$(BIN)/pytest -n 2 -m "not slow"

test-slow: $(SETUP)
	$(BIN)/pytest -n 2 -m slow

test-all: test test-slow

# Not part of .ci/run, which has to end within 30 minutes.
soak: $(SETUP)
	PYTHONPATH=tests $(BIN)/python -m faults.soak --minutes 20

test-faults: $(SETUP)
	PYTHONPATH=tests $(BIN)/python -m faults

# What a person gets who installs without the constraints; made anew each time, since what is newest changes.
test-newest:
	rm -rf $(NEWEST) dist
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check \
		"$$(grep '^torch==' constraints.txt)" "$$(echo dist/*.whl)[report,test]"
	$(NEWEST)/bin/pytest -n 2 tests/cli

check: $(SETUP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint deploy/*.Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml

# Not part of .ci/run: the lists of vulnerabilities are elsewhere, and a checkout must pass without the network.
audit:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(AUDIT)/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

docs: $(SETUP)
	$(BIN)/python -m pfedhn.paper.methods_page
	$(BIN)/python tools/networks_page.py
	$(BIN)/mkdocs build --strict

results: $(SETUP)
	$(BIN)/python -m pfedhn.paper.results_page
	$(BIN)/python -m pfedhn.paper.paper_page

# Not part of .ci/run: it needs the data (docs/silos.md), in the folder that PFEDHN_DATA_DIR names.
tables: $(SETUP)
	for file in benchmarks/tables/*.toml; do name=$$(basename $$file .toml); \
		$(BIN)/pfedhn run $$file --out runs/tables/$$name && \
		$(BIN)/pfedhn report runs/tables/$$name --export results/tables/$$name.jsonl || exit 1; done
	$(BIN)/python tools/tables_page.py

clean:
	rm -rf $(VENV) $(NEWEST) $(AUDIT) site build dist
