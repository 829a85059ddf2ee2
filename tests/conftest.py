"""What every test needs before torch and vLLM are imported."""

import os

import pytest

from cluster.engine.cpu import profile

# Before any test module is imported: torch and vLLM read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
profile.activate()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-requests", type=int, help="Send so many random requests, not as many as time allows.")
