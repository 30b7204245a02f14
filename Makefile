# make demo   from nothing to the table: environment, model, the main job on SmolLM2-135M
# make paper  from nothing to every table and figure of experiments/smollm2, and the README's table
# make drafts  every shipped draft, trained anew: hours on two cores
# make test   the same environment, then the test-suite
# make lint   ruff and the type checker
# make test-oldest   the test-suite with the oldest transformers that is supported, in an environment of its own
# make test-speculators   exported EAGLE-3 drafts through the speculators package's own loader, in one more environment
#
# PYTHON    the interpreter to start from (3.11 or newer)
# PYTEST_ARGS  passed to pytest; all cores, one test file at a time on each, unless you say otherwise
# PIP_ARGS  passed to every pip install, for example an index that has PyTorch's CPU wheels

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?= -n auto --dist loadfile

VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
SPECULATORS := .venv-speculators

# Some shells and images set this; every process would then compile all of torch and transformers anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo paper drafts test test-oldest test-speculators lint clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

$(VENV)/.created $(OLDEST)/.created $(SPECULATORS)/.created:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "selfspec: no interpreter '$(PYTHON)'. Install Python 3.11 or newer, or say which one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "selfspec: '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1), but Python 3.11 or newer is needed. Say which one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	"$(PYTHON)" -m venv $(@D)
	@touch $@

# constraints.txt pins torch: an unpinned one would bring gigabytes of CUDA libraries to a machine without a GPU.
# --no-compile: Python compiles what is imported, and not the thousands of modules that are not.
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

# The same pins, except transformers and the one package that an older transformers wants older, too.
$(OLDEST)/.installed: $(OLDEST)/.created pyproject.toml constraints.txt
	grep -vE '^(transformers|huggingface_hub)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-compile $(PIP_ARGS) -c $(OLDEST)/constraints.txt \
	  -e '.[dev]' 'transformers==5.17.*'
	@touch $@

# speculators 0.9 wants transformers of 5.19 or older; all of it is pinned, torch as everywhere.
$(SPECULATORS)/.installed: $(SPECULATORS)/.created constraints.txt tests/training/speculators_requirements.txt
	$(SPECULATORS)/bin/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints.txt torch
	$(SPECULATORS)/bin/python -m pip install --quiet --no-compile $(PIP_ARGS) --no-deps \
	  -r tests/training/speculators_requirements.txt
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python experiments/compare.py experiment=smollm2_quick

# Killed at any point, it goes on where it stopped.
paper: $(VENV)/.installed
	$(BIN)/python experiments/paper.py

# Finished stages are not trained again.
drafts: $(VENV)/.installed
	PYTHON=$(BIN)/python sh experiments/smollm2/train_drafts.sh

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -q $(PYTEST_ARGS)

test-speculators: $(VENV)/.installed $(SPECULATORS)/.installed
	$(BIN)/python -m pytest -q -s tests/training/test_speculators_loader.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(OLDEST) $(SPECULATORS) build dist .pytest_cache .mypy_cache .ruff_cache
