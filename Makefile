# Needs python3 (3.11 to 3.13) and make; everything else goes into .venv. PROFILE=gpu installs vLLM's CUDA build.
PYTHON ?= python3
PROFILE ?= cpu
BIN := .venv/bin

.PHONY: demo test check format protos install clean

demo: install ## a real model answers, with speculative decoding
	@$(BIN)/dspark-cluster demo

test: install ## all tests
	@$(BIN)/python -m pytest

check: install ## the quick loop: lint, types, unit tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/unit

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
