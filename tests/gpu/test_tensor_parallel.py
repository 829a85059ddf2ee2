"""A target of two tensor-parallel ranks on two GPUs, its draft in another process on the second one. Needs vLLM's CUDA
build and two GPUs."""

import os
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from cluster.engine.settings import EngineSettings
from cluster.errors import UserError
from tests.gpu.engines import START_TIMEOUT_S, Separate, apart, run_arm, settings_of
from tests.gpu.test_split import LONGEST_WAIT_S, ON_THE_OTHER_GPU, PAIR, RUN, RUNNING, run_and_kill
from tests.split.ranks import rank_process

pytestmark = pytest.mark.gpu

if torch.cuda.device_count() < 2:
    pytest.skip("there are no two GPUs", allow_module_level=True)

SEPARATE = Separate(channel="cuda_ipc", draft_environment=ON_THE_OTHER_GPU)
END_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    return settings_of(PAIR, tmp_path_factory.mktemp(PAIR), compilation_mode=0, tensor_parallel_size=2)


@pytest.fixture(scope="module")
def colocated(settings: EngineSettings) -> Any:
    return apart(run_arm, settings, None)[0]


def test_drafts_are_those_of_the_pair_in_one_engine_of_two_ranks(settings: EngineSettings, colocated: Any) -> None:
    runs, lost = apart(run_arm, settings, SEPARATE)
    assert lost is None
    assert runs == colocated


def test_both_ranks_go_on_within_200_ms_of_the_drafts_death(settings: EngineSettings, colocated: Any) -> None:
    tokens, waits, lost = apart(run_and_kill, settings, SEPARATE)
    assert lost
    assert [wait for wait in waits if wait[1] >= LONGEST_WAIT_S] == []
    assert tokens == [list(completion.token_ids) for completion in colocated[RUN][0]]


def run_and_kill_a_rank(settings: EngineSettings, connection: Connection) -> None:
    """Sends a word when the rank is killed, and then, if the engine fails and doesn't end this process, why."""
    with SEPARATE.start(settings) as engine:
        try:
            for number, _ in enumerate(engine.stream(RUNNING)):
                if number == 10:
                    os.kill(rank_process(engine), signal.SIGKILL)
                    connection.send("killed")
        except UserError as error:
            connection.send(str(error))


def test_a_rank_that_is_killed_ends_the_engine_or_its_process(settings: EngineSettings) -> None:
    """The kernels of NCCL that wait for it never end."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_and_kill_a_rank, args=(settings, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(START_TIMEOUT_S)
        assert ours.recv() == "killed"
        process.join(END_DEADLINE_S)
        said = ours.recv() if process.exitcode == 0 else ""
        assert process.exitcode == 1 or said.startswith("tensor-parallel rank 1: its process has ended")
    finally:
        process.kill()
