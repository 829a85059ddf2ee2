"""A process that is killed is started again, until it is stopped; and one that is to be killed at a point is."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster.contract.codec import to_plain
from cluster.contract.policy import Policy
from cluster.control.settings import CoordinatorSettings
from cluster.control.supervisor import SupervisedProcess
from tests.cluster.waiting import eventually
from tests.control import join

DEADLINE_S = 60

DIES_AT_ITS_SECOND_MESSAGE = """
from cluster.channel.faults import Faults, FaultsConfig, KillFault
faults = Faults(FaultsConfig(kills=(KillFault(at="draft.received", nth=2),)), "draft")
faults.reach("sent")
faults.reach("received")
print("once", flush=True)
faults.reach("received")
print("twice", flush=True)
"""


def test_a_coordinator_that_is_killed_is_there_again_at_its_address(tmp_path: Path) -> None:
    settings = CoordinatorSettings(address=f"unix:{tmp_path / 'coordinator'}", policy=Policy())
    supervised = SupervisedProcess("coordinator", "cluster.control.coordinator_process", to_plain(settings))
    supervised.await_start()
    first = supervised.popen
    with join(settings.address, "draft"):
        first.send_signal(signal.SIGKILL)
        eventually(lambda: supervised.popen.pid != first.pid, deadline_s=DEADLINE_S)
    with join(settings.address, "draft"):
        assert supervised.restarts == 1
    last = supervised.popen
    supervised.stop(DEADLINE_S)
    assert last.returncode == 0
    assert supervised.popen is last


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_is_stopped_while_it_is_started_again_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = CoordinatorSettings(address=f"unix:{tmp_path / 'coordinator'}", policy=Policy())
    supervised = SupervisedProcess("coordinator", "cluster.control.coordinator_process", to_plain(settings))
    supervised.await_start()
    first = supervised.popen
    first.send_signal(signal.SIGKILL)
    eventually(lambda: supervised.popen.pid != first.pid, deadline_s=DEADLINE_S)
    supervised.stop(0)
    assert supervised.popen.returncode is not None
    eventually(lambda: not supervising(), deadline_s=DEADLINE_S)
    assert "coordinator's process:" not in capfd.readouterr().err


def test_one_that_is_about_to_end_is_not_started_again(tmp_path: Path) -> None:
    settings = CoordinatorSettings(address=f"unix:{tmp_path / 'coordinator'}", policy=Policy())
    supervised = SupervisedProcess("coordinator", "cluster.control.coordinator_process", to_plain(settings))
    supervised.await_start()
    supervised.let_end()
    supervised.popen.send_signal(signal.SIGKILL)
    eventually(lambda: not supervising(), deadline_s=DEADLINE_S)
    assert supervised.restarts == 0
    supervised.stop(DEADLINE_S)


def supervising() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dspark-supervise")]


def test_a_process_ends_at_its_point() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DIES_AT_ITS_SECOND_MESSAGE],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == "once\n"
