# Two commands do everything from a fresh clone: `make demo` and `make test`. Both share `make venv`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := data,fast,dedup,plot,demo,track,scale,remote,dev

.DEFAULT_GOAL := help
.PHONY: help venv demo test docs lint types unit torture torture-data clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## make .venv with the pinned packages (the other targets do it too)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; name another one: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP)  ## raw text -> shards -> a trained, sampled model, under 10 minutes on 2 cores
	@$(BIN)/python scripts/demo.py

test: lint types unit  ## ruff, mypy and every test that needs no GPU, offline

docs: $(STAMP)  ## write docs/configuration.md and the comments in configs/ anew from the code
	@$(BIN)/python -m gpt_oss_lite.config.docs

lint: $(STAMP)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy
	$(BIN)/mypy

unit: $(STAMP)  ## pytest
	$(BIN)/python -m pytest -q -n auto -m "not gpu"

torture: $(STAMP)  ## 100 kills, 10,000 fuzzed cases and every fault, in about half an hour
	$(BIN)/python scripts/torture.py --kills 100 --fuzz 10000

torture-data: $(STAMP)  ## the pipeline in every way, killed at 20 points and more, in about three minutes
	$(BIN)/python scripts/torture_pipeline.py --kills 20

clean:  ## remove caches (not .venv, data or runs)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
