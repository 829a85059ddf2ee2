# Needs python3 (3.11 to 3.13) and make; everything else goes into .venv. `make PROFILE=gpu install` installs vLLM's CUDA
# build, which later commands then keep.
PYTHON ?= python3
PROFILE ?=
BIN := .venv/bin
# Processes that run tests side by side. Most tests keep one core busy.
WORKERS ?= 2

# Containers often forbid Python to keep its bytecode: every process that imports vLLM would compile it all again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check lint format protos install clean

demo: install ## a real model answers, with speculative decoding
	@$(BIN)/dspark-cluster demo

test: install ## all tests
	@$(BIN)/python -m pytest -v --durations=30 -n $(WORKERS) --no-loadscope-reorder

check: lint ## the quick loop: lint, types, unit tests
	@$(BIN)/python -m pytest -q tests/unit

lint: install ## lint, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: install
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

protos: install ## the generated code beside protos/*.proto, which is committed
	@$(BIN)/python protos/generate.py

install:
	@command -v $(PYTHON) >/dev/null || { echo "install: there is no $(PYTHON); install Python 3.11 to 3.13" >&2; exit 2; }
	@$(PYTHON) requirements/install.py $(PROFILE)

clean: ## remove .venv and caches, not the models under DSPARK_CACHE
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
