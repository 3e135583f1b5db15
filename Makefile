# Everything runs in .venv, made on first use from python3 and pip alone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CLIENTS := .venv-clients
MODEL  ?= smollm2-135m
HOST   ?= 127.0.0.1
PORT   ?= 8000
DTYPE  ?= auto
HOURS  ?= 2
ARGS   ?=

# Tests run on up to eight cores, a process of one thread on each; on a machine with a GPU one after another, or they
# would fight for its memory.
WORKERS ?= $(if $(shell command -v nvidia-smi 2>/dev/null),0,auto)

# On a machine without an NVIDIA GPU this torch comes first, or pip would bring the newest with gigabytes of CUDA.
TORCH  := $(if $(shell command -v nvidia-smi 2>/dev/null),,torch==2.13.0)

.PHONY: setup serve chat test test-clients test-fleet lint docs fuzz soak mutants bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/python -m pip install --quiet $(TORCH))
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--config-settings editable_mode=compat --editable '.[dev,docs]'
	@touch $@

serve: setup
	$(BIN)/mini-sglang serve $(MODEL) --host $(HOST) --port $(PORT) --dtype $(DTYPE) $(ARGS)

chat: setup
	$(BIN)/mini-sglang chat $(MODEL) --dtype $(DTYPE) $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

# Programs that talk to the server (docs/api.md). They are large, so they have an environment of their own.
test-clients: $(CLIENTS)/.ready
	NODE_PATH=$(CURDIR)/$(CLIENTS)/node_modules $(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

# Several servers behind a router or Ray Serve. Takes minutes.
test-fleet: $(CLIENTS)/.ready
	$(CLIENTS)/bin/python -m pytest -s tests/fleet $(ARGS)

$(CLIENTS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(if $(TORCH),$(CLIENTS)/bin/python -m pip install --quiet $(TORCH))
	grep -v '^python-dateutil==' constraints.txt > $(CLIENTS)/constraints.txt  # boto3, which litellm needs, wants an older one
	$(CLIENTS)/bin/python -m pip install --quiet --constraint $(CLIENTS)/constraints.txt \
		--config-settings editable_mode=compat --editable '.[dev,clients,ray]'
	$(if $(shell command -v npm 2>/dev/null),npm install --silent --prefix $(CLIENTS) openai@6 @anthropic-ai/sdk)
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # the notice is of another version, not of this site

# Ten minutes each: files, templates and tokens to their readers, and requests made from the API's description to a server.
fuzz: setup
	FUZZ_SECONDS=600 $(BIN)/python -m pytest tests/fuzz --timeout 1200 $(ARGS)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'schemathesis>=4.32'
	FUZZ_SECONDS=600 $(BIN)/python -m pytest tests/server/test_schemathesis.py --timeout 1200 $(ARGS)

# Hours of mixed traffic at a server of its own: make soak HOURS=2 ARGS='-- --device cuda'
soak: setup
	$(BIN)/python -m tests.stress.soak --hours $(HOURS) --model $(MODEL) $(ARGS)

# Which statements the tests would not miss: 1,200 removals, one at a time; minutes on 16 cores, half an hour on two.
mutants: setup
	$(BIN)/python -m tests.mutants $(ARGS)

bench: setup
	$(BIN)/python -m benchmarks.cpu $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
