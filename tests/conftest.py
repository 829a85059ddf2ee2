"""What every test needs before torch and vLLM are imported."""

import os
from typing import Any

import pytest
from hypothesis import settings

from cluster.engine.cpu import profile

# Before any test module is imported: torch and vLLM read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
profile.activate()

# How long an example takes is the machine's affair, on which other tests run.
settings.register_profile("shared machine", settings(), deadline=None)
settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-requests", type=int, help="Send so many random requests, not as many as time allows.")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.scheduling import GroupScheduling

    return GroupScheduling(config, log)
