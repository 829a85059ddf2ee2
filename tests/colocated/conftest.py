"""Real vLLM engines for tiny checkpoints, in this process, one of a kind for all tests of this folder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.engine.cpu import profile
from cluster.engine.in_process import GenerationRequest, InProcessEngine
from cluster.engine.settings import EngineSettings
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model
from tests.checkpoints import PAIRS, make_pair

# Several engines live in one process here, which vLLM's CUDA graphs and workspace forbid.
collect_ignore_glob = [] if profile.is_cpu_installation() else ["test_*.py"]

MAX_MODEL_LEN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """The same target twice: alone, and with its draft in the same process."""

    name: str
    plain: InProcessEngine
    colocated: InProcessEngine
    num_speculative_tokens: int


@pytest.fixture(scope="package")
def start_engine() -> Iterator[Callable[[EngineSettings], InProcessEngine]]:
    """Start an engine that lives until this folder's tests end.

    Together to the end, because vLLM's engines share a process's distributed state: the first to close takes it from
    the others. A later engine in the same process starts in 2 s.
    """
    engines: list[InProcessEngine] = []

    def start(settings: EngineSettings) -> InProcessEngine:
        engines.append(InProcessEngine(settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="package", params=PAIRS)
def arms(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    start_engine: Callable[[EngineSettings], InProcessEngine],
) -> Arms:
    pair = make_pair(request.param, tmp_path_factory.mktemp(request.param))
    return start_arms(pair.name, pair.target, pair.draft, pair.num_speculative_tokens, start_engine)


def start_arms(
    name: str, target: Path, draft: Path, tokens: int, start: Callable[[EngineSettings], InProcessEngine]
) -> Arms:
    model = open_model(str(target), role="target")
    speculation = plan_speculation(model, open_model(str(draft), role="draft"), tokens)
    sizes = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks": 32,
    }
    return Arms(
        name=name,
        plain=start(EngineSettings(target=model, **sizes)),
        colocated=start(EngineSettings(target=model, speculation=speculation, **sizes)),
        num_speculative_tokens=speculation.num_speculative_tokens,
    )


def greedy(*prompts: tuple[int, ...], max_tokens: int = 24) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_token_ids=prompt, max_tokens=max_tokens, ignore_eos=True) for prompt in prompts]
