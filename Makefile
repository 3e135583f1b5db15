# Everything runs in .venv, made on first use from python3 and pip alone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2-135m
HOST   ?= 127.0.0.1
PORT   ?= 8000
DTYPE  ?= auto
ARGS   ?=

# On a machine without an NVIDIA GPU this torch comes first, or pip would bring the newest with gigabytes of CUDA.
TORCH  := $(if $(shell command -v nvidia-smi 2>/dev/null),,torch==2.13.0)

.PHONY: setup serve chat test lint docs bench clean

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
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # the notice is of another version, not of this site

bench: setup
	$(BIN)/python benchmarks/cpu.py $(ARGS)

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
