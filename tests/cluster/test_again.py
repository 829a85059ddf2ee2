"""An actor that Ray has started again, in real Ray."""

import os
import signal
from pathlib import Path
from typing import Any, Final

import ray
from ray.cluster_utils import Cluster

from actors.again import call_own, was_restarted
from tests.cluster.waiting import eventually

DEADLINE_S = 60
FAILURES: Final = 2


class Stubborn:
    """Started again, it fails so many times, as nobody foresaw. Each try leaves its process's id in the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if was_restarted():
            call_own("start")

    async def start(self) -> None:
        (self._folder / str(os.getpid())).touch()
        if len(list(self._folder.iterdir())) <= FAILURES:
            raise RuntimeError("CUDA error")
        (self._folder / "started").touch()

    async def process(self) -> int:
        return os.getpid()


def test_an_actor_that_fails_when_it_was_started_again_is_started_again(
    two_nodes: Cluster,  # noqa: ARG001 - a session that it lives in
    tmp_path: Path,
) -> None:
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1)(Stubborn).remote(tmp_path)
    os.kill(ray.get(actor.process.remote()), signal.SIGKILL)
    eventually((tmp_path / "started").exists, deadline_s=DEADLINE_S)
    assert len(list(tmp_path.iterdir())) == FAILURES + 2
    ray.kill(actor)
