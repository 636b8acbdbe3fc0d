# `make demo` and `make test` each do all they need: environment, install, run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.PHONY: help venv demo test check docs results clean

help:
	@echo "make demo    train on the embedded digits and draw what came out (one to two minutes after the install)"
	@echo "make test    run the tests"
	@echo "make check   ruff, mypy --strict, import-linter"
	@echo "make docs    build the documentation into site/"
	@echo "make results write docs/results.md and its pictures from the files in results/"
	@echo "make clean   remove the environment and what was built"

venv: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,docs]"
	touch $@

demo: $(SETUP)
	$(BIN)/pfedhn demo

test: $(SETUP)
	$(BIN)/pytest -n 2

check: $(SETUP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(SETUP)
	$(BIN)/python tools/methods_page.py
	$(BIN)/mkdocs build --strict

results: $(SETUP)
	$(BIN)/python tools/results_page.py

clean:
	rm -rf $(VENV) site build dist
