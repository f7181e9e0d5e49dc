# make demo   everything from nothing, then the main job with and without sharing
# make test   everything from nothing, then every test, the engine's included
# make check  formatting, lint, types, layers
# make bench  the measurements behind the README's tables
# make fix    let the tools repair what they can
# make venv   only .venv, with the program in it
# make engine .venv and the engine: what `.venv/bin/polykv-proxy serve` needs
# make clean  remove what was made here; built engines stay in the cache (see `polykv-proxy config show`)
#
# All of them set up .venv first and are quick when nothing changed. PYTHON chooses the interpreter.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test quick check bench fix clean venv engine systemd-analyze

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
comma := ,
# a file's tests share what they started; each engine has one thread and a few hundred MiB
PARALLEL := --numprocesses logical --maxprocesses 4 --dist loadfile
# the environment is made anew when what goes into it changes
STAMP := .venv/.made-$(shell sha256sum pyproject.toml | cut -c1-16)

# $(call need,TEST,PACKAGE): unless TEST succeeds, install a Debian package where we may, else say so
need = @{ $(1); } >/dev/null 2>&1 || { \
    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
        echo "installing $(2)"; apt-get update -qq && \
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2) </dev/null >/dev/null; \
    else echo "$(2) is missing; install it (Debian: apt install $(2))" >&2; exit 1; fi; }

help:
	@sed -n 's/^# \?//p' Makefile | sed '/^All of them/q'

demo: engine
	@$(BIN)/polykv-proxy demo

test: engine systemd-analyze
	@$(BIN)/python -m pytest $(PARALLEL)

quick: venv # the tests that need no built engine
	@$(BIN)/python -m pytest $(PARALLEL) -m 'not engine'

bench: engine
	@$(BIN)/python -m tests.benchmarks

check: venv
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fix: venv
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
	find polykv_proxy tests -name __pycache__ -type d -exec rm -rf {} +

venv: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed; name one with PYTHON=..." >&2; exit 1; }
	$(call need,$(PYTHON) -c "import ensurepip$(comma) venv",python3-venv)
	@echo "setting up .venv"
	@rm -f .venv/.made-*
	@$(PYTHON) -m venv .venv
	@$(PIP) --upgrade 'pip>=25.1'
	@$(PIP) --editable '.[client,langgraph]' --group dev
	@touch $@

# a compiler must come from the system; cmake and ninja also come from the package index
engine: venv
	$(call need,command -v c++ || command -v g++ || command -v clang++,g++)
	$(call need,command -v git || command -v patch,git)
	@{ command -v cmake && command -v ninja; } >/dev/null 2>&1 || \
	    { [ -x $(BIN)/cmake ] && [ -x $(BIN)/ninja ]; } || $(PIP) --editable '.[build]'
	@$(BIN)/polykv-proxy engine build >/dev/null

systemd-analyze: # checks the unit file; no systemd has to run
	$(call need,command -v systemd-analyze,systemd)
