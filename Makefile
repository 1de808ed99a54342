# Everything that is done with Quire from a clone; `make` alone lists it. Needs only Python (3.11 or newer) and pip.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CLIENTS := .clients
NATIVE := $(wildcard gpuworker/native/*.cpp gpuworker/native/*.h gpuworker/native/build.py)
MODEL  ?= cli/demo_model/checkpoint
TESTS  ?= tests
JOBS   ?= 0
BENCH  ?= split
# More OpenMP threads than cores makes every tensor operation crawl; the tests run several processes at once.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install clients demo demo-svg up test search check fmt lint types protos protos-baseline pins bench bench-gpu clean

help: ## List what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Make the environment in .venv (once; again when pyproject.toml or constraints.txt change)

$(STAMP): pyproject.toml protos/pyproject.toml constraints.txt hatch_build.py $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quire needs Python 3.11 or newer; set PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing what constraints.txt pins into $(VENV); a minute or two the first time."
	@$(BIN)/python -m pip install --disable-pip-version-check $$(test -t 1 || echo --quiet) -c constraints.txt -e ./protos -e '.[router,kvmanager,gpuworker,cli,local,bench,dev]'
	@touch $@

clients: $(CLIENTS)/.installed ## Install the clients that the tests call with: .clients, and what the examples in Node and C++ need
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		command -v npm >/dev/null || set -- nodejs npm; \
		command -v grpc_cpp_plugin >/dev/null || set -- "$$@" g++ make pkg-config libgrpc++-dev protobuf-compiler-grpc; \
		[ $$# = 0 ] || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$$@"; }; fi
	@! command -v npm >/dev/null || npm ci --silent --prefix protos/examples/node
	@! command -v grpc_cpp_plugin >/dev/null || $(MAKE) --silent -C protos/examples/cpp

# Their own environment: some need an older protobuf than Quire does.
$(CLIENTS)/.installed: tests/suites/clients/requirements.txt
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --disable-pip-version-check $$(test -t 1 || echo --quiet) -r $<
	@touch $@

demo: $(STAMP) ## Start the whole suite, ask the demo model a few things, show the cache and a trace, stop
	$(BIN)/quire demo

demo-svg: $(STAMP) ## Run the demonstration and draw its output into docs/demo.svg
	$(BIN)/quire demo --svg docs/demo.svg

up: $(STAMP) ## Run the whole suite in the foreground (MODEL=DIR to serve another checkpoint)
	$(BIN)/quire up --model $(MODEL)

test: $(STAMP) ## Run the tests (TESTS=PATH for some of them, JOBS=N in that many processes)
	$(BIN)/python -m pytest -n $(JOBS) $(TESTS)
	@if [ "$(TESTS)" = tests ]; then \
		TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/suites/triton_interpreted && $(BIN)/python -m pytest tests/suites/triton_compiled; fi

test-docker: $(STAMP) ## Build the images, run the stack on this host's Docker engine under load, scale it, break it (minutes)
	$(BIN)/python -m pytest -n 0 -x -s --timeout 1800 tests/suites/deployment/docker/engine

search: $(STAMP) ## Search the lease protocol's model at length (7 minutes), and print which mutant each search kills
	$(BIN)/python -m pytest -m exhaustive tests/suites/protocol
	$(BIN)/python -m tests.suites.protocol.mutants

check: $(STAMP) lint types ## All that must be clean: ruff, mypy, import contracts, buf, drift of generated code
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
	@mv constraints.new constraints.txt && touch $(STAMP)

bench: $(STAMP) ## Measure (BENCH=split|waste|prefix|engine|serve|load|constraints|peers|phases|cpu_attention|..., ARGS=...)
	$(BIN)/python -m bench.$(BENCH) $(ARGS)

bench-gpu: ## Measure kernels and engine on a GPU: needs torch, triton and transformers alone, of .venv or of PYTHON
	@for name in attention linear engine; do \
		$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m bench.gpu_$$name || exit $$?; done

clean: ## Remove the environment, caches and run-time files
	rm -rf $(VENV) $(CLIENTS) .quire .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
