# Everything that is done with Quire from a clone; `make` alone lists it. Needs only Python (3.11 or newer) and pip.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# PACKAGES: what constraints.txt pins is installed. STAMP: the CPU kernels are built too.
PACKAGES := $(VENV)/.packages
STAMP  := $(VENV)/.installed
CLIENTS := .clients
NATIVE := $(wildcard gpuworker/native/*.cpp gpuworker/native/*.h gpuworker/native/build.py)
MODEL  ?= cli/demo_model/checkpoint
TESTS  ?= tests
# Processes that run tests: one for each core that this shell may use, eight at most. Two for each core are slower.
JOBS   ?= $(shell $(PYTHON) -c 'import os; print(min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))')
BENCH  ?= split
COVERAGE_FLOOR := 95
# Tests that share a started suite run in one process (tests/conftest.py groups them).
PYTEST := $(BIN)/python -m pytest -n $(JOBS)
# More OpenMP threads than cores makes every tensor operation crawl; the tests run several processes at once.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install clients demo demo-svg up test-fast test test-rest test-all test-docker search coverage check fmt lint types protos protos-baseline pins bench bench-gpu clean

help: ## List what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Make the environment in .venv (once; again when pyproject.toml or constraints.txt change)

# pip's chatter becomes a line for every 20 packages; its errors, and its other warnings, come through.
define PIP_FILTER
/^WARNING: Location .* is ignored/ { next }
/^(Collecting|Processing|Requirement already satisfied)/ { if (++found % 20 == 0) { print "    " found " packages found"; fflush() } next }
/^ *Downloading .*\([0-9.]+ GB\)|^ *Downloading .*\([0-9][0-9]+\.[0-9] MB\)/ { sub(/^ */, "    "); print; fflush(); next }
/^Installing collected packages/ { print "    installing " NF - 3 " packages"; fflush(); next }
/^ *(Downloading|Using cached|Created wheel|Stored in|Attempting uninstall|Found existing|Uninstalling|Successfully|Preparing|Building|Getting|Installing|Checking|Obtaining|Looking) ?/ { next }
/^ *━|^ *$$/ { next }
{ print; fflush() }
endef
export PIP_FILTER

$(PACKAGES): pyproject.toml protos/pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quire needs Python 3.11 or newer; set PYTHON=...")'
	@test -x $(BIN)/python || { echo "1/3 creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "2/3 installing pinned packages (a minute or two)"
	@{ HATCH_BUILD_NO_HOOKS=1 $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt \
		-e ./protos -e '.[router,kvmanager,gpuworker,cli,local,bench,dev]' 2>&1 || touch $@.failed; } | awk "$$PIP_FILTER"
	@! rm $@.failed 2>/dev/null
	@touch $@

# Without a compiler there is no stamp: each `make` tries again, which takes no time.
$(STAMP): $(PACKAGES) $(NATIVE)
	@echo "3/3 building CPU kernels"
	@if said=$$($(BIN)/python gpuworker/native/build.py 2>&1 >/dev/null); then touch $@; \
	elif echo "$$said" | grep -q "no C++ compiler"; then \
		echo "    no C++ compiler: slower torch kernels run on the CPU; install one (Debian: apt-get install g++), then run make again"; \
	else echo "$$said"; exit 1; fi

clients: $(CLIENTS)/.installed ## Install the clients that the tests call with: .clients, and what the examples in Node and C++ need
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		command -v npm >/dev/null || set -- nodejs npm; \
		command -v grpc_cpp_plugin >/dev/null && pkg-config --exists grpc++ protobuf || \
			set -- "$$@" g++ make pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc; \
		[ $$# = 0 ] || { echo "installing $$*" && apt-get update -qq && \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$$@" >/dev/null; }; fi
	@! command -v npm >/dev/null || npm ci --silent --prefix protos/examples/node
	@! command -v grpc_cpp_plugin >/dev/null || $(MAKE) --silent -C protos/examples/cpp

# Their own environment: some need an older protobuf than Quire does.
$(CLIENTS)/.installed: tests/suites/clients/requirements.txt
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@echo "installing clients that Quire did not write into $(CLIENTS)"
	@{ $(CLIENTS)/bin/python -m pip install --disable-pip-version-check --progress-bar off -r $< 2>&1 || touch $@.failed; } | awk "$$PIP_FILTER"
	@! rm $@.failed 2>/dev/null
	@touch $@

demo: $(STAMP) ## Start the whole suite, ask the demo model a few things, show the cache and a trace, stop
	$(BIN)/quire demo

demo-svg: $(STAMP) ## Run the demonstration and draw its output into docs/demo.svg
	$(BIN)/quire demo --svg docs/demo.svg

up: $(STAMP) ## Run the whole suite in the foreground (MODEL=DIR to serve another checkpoint)
	$(BIN)/quire up --model $(MODEL)

test-fast: $(STAMP) ## Run the tests that need neither torch nor a started service: the cores and the units (under a minute)
	$(PYTEST) --fast tests

test: $(STAMP) ## Run the tests that need nothing else installed (TESTS=PATH for some of them, JOBS=N in that many processes)
	$(PYTEST) $(if $(filter tests,$(TESTS)),-m "not clients and not long") $(TESTS)

# Triton's interpreter and its compiler need a process each.
test-rest: $(STAMP) ## Run what `make test` leaves out: clients that Quire did not write, long searches, Triton's kernels
	@failed=0; set -x; \
	$(PYTEST) -m "clients or long" tests || failed=1; \
	TRITON_INTERPRET=1 $(PYTEST) tests/suites/triton_interpreted || failed=1; \
	$(BIN)/python -m pytest tests/suites/triton_compiled || failed=1; \
	exit $$failed

test-all: $(STAMP) ## Run every test: test, test-rest, a real Prometheus if it is installed, and search (half an hour)
	@failed=0; set -x; \
	$(MAKE) test || failed=1; \
	$(MAKE) test-rest || failed=1; \
	$(BIN)/python -m pytest -m prometheus tests/suites/deployment/operate || failed=1; \
	$(MAKE) search || failed=1; \
	exit $$failed

test-docker: $(STAMP) ## Build the images, run the stack on this host's Docker engine under load, scale it, break it (minutes)
	$(BIN)/python -m pytest -n 0 -x -s --timeout 1800 tests/suites/deployment/docker/engine

search: $(STAMP) ## Search the lease protocol's model at length (7 minutes), and print which mutant each search kills
	$(PYTEST) -m exhaustive tests/suites/protocol
	$(BIN)/python -m tests.suites.protocol.mutants

# Just below what is measured: a change that leaves parts of a core untested fails.
coverage: $(STAMP) ## Measure how much of the pure cores their own tests run, and fail below the floor
	$(PYTEST) -q -m "not searches" --cov=router.core --cov=kvmanager.core --cov=gpuworker.core --cov-branch --cov-report=term-missing:skip-covered \
		--cov-fail-under=$(COVERAGE_FLOOR) tests/router/core tests/kvmanager/core tests/gpuworker/core

check: $(STAMP) lint types coverage ## All that must be clean: ruff, mypy, coverage of the cores, import contracts, buf, drift of generated code
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/baseline.binpb
	$(BIN)/python protos/generate.py --check

fmt: $(STAMP) ## Format the code and mend what ruff can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: $(STAMP) ## Check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/hadolint docker/*.Dockerfile

types: $(STAMP) ## Check types
	$(BIN)/mypy

protos: $(STAMP) ## Generate the Python code of the .proto files, beside them
	$(BIN)/python protos/generate.py

protos-baseline: $(STAMP) ## Make today's .proto files the ones that later ones must not break
	$(BIN)/buf build -o protos/baseline.binpb

pins: $(STAMP) ## Write what is installed now into constraints.txt
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//'; } > constraints.new
	@mv constraints.new constraints.txt && touch $(PACKAGES) $(STAMP)

bench: $(STAMP) ## Measure (BENCH=split|waste|prefix|engine|serve|load|constraints|peers|phases|cpu_attention|..., ARGS=...)
	$(BIN)/python -m bench.$(BENCH) $(ARGS)

bench-gpu: ## Measure kernels and engine on a GPU: needs torch, triton and transformers alone, of .venv or of PYTHON
	@for name in attention linear engine; do \
		$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m bench.gpu_$$name || exit $$?; done

clean: ## Remove the environment, caches and run-time files
	rm -rf $(VENV) $(CLIENTS) .quire .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
