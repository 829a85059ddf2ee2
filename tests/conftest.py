"""What every test needs before torch and vLLM are imported; and which tests go together where they run in parallel."""

import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For pytest-xdist's `loadgroup`: what shares an engine or a Ray cluster runs in one worker, in its order."""
    for item in items:
        if isinstance(item, pytest.Function) and (group := group_of(item)):
            item.add_marker(pytest.mark.xdist_group(group))


def group_of(test: pytest.Function) -> str | None:
    """The folder whose fixtures it takes, with their parameters, or else the module; None where it takes neither's."""
    fixtures = [definitions[-1] for definitions in test._fixtureinfo.name2fixturedefs.values()]
    folder = test.path.parent.name
    if any(fixture.scope == "package" for fixture in fixtures):
        shared = [each.argname for each in fixtures if each.scope == "package" and each.params]
        return " ".join([folder, *(str(test.callspec.params[name]) for name in shared)])
    return f"{folder} {test.path.stem}" if any(fixture.scope == "module" for fixture in fixtures) else None
