"""A target in this process and its draft in another (placement `separate`)."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from cluster.channel.base import ChannelKind
from cluster.engine.in_process import InProcessEngine
from cluster.engine.settings import EngineSettings
from cluster.errors import UserError
from cluster.speculation import control
from cluster.speculation.settings import DEFAULT_ROUND_DEADLINE_S, RemoteDraftSettings

DRAFT_MODULE: Final = "cluster.speculation.draft_process"

STOP_TIMEOUT_S: Final = 15.0
"""For a process whose target has gone. It has nothing to save, but takes 3 s to unload vLLM, longer on a busy host."""


class SeparateEngine(InProcessEngine):
    """As InProcessEngine, with the draft's process started before it and ended after it."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        channel: ChannelKind = "shm",
        round_deadline_s: float = DEFAULT_ROUND_DEADLINE_S,
        draft_module: str = DRAFT_MODULE,
    ) -> None:
        """`draft_module` is what the draft's process runs; tests have one that misbehaves."""
        if settings.speculation is None:
            raise UserError("placement separate", "there is no draft to separate", "name one with --draft")
        self._folder = Path(tempfile.mkdtemp(prefix="dspark-pair-"))
        address = str(self._folder / "draft")
        self._draft_process = _start_draft(settings, address, draft_module)
        remote = RemoteDraftSettings(address=address, channel=channel, round_deadline_s=round_deadline_s)
        try:
            super().__init__(settings, additional_config=remote.to_additional_config())
        except BaseException:
            self._draft_process.terminate()  # it may be loading, and not yet look at its target
            self._end_process()
            raise
        # vLLM takes it from its worker when the engine closes.
        self._speculator = self.vllm_engine.model_executor.driver_worker.worker.model_runner.speculator

    def close(self) -> None:
        self.stop_draft()
        super().close()

    def stop_draft(self) -> None:
        """End the draft's process; the target goes on without proposals. A second call does nothing."""
        self._speculator.close()
        self._end_process()

    @property
    def draft_process(self) -> subprocess.Popen[bytes]:
        """For those who want to know whether it lives."""
        return self._draft_process

    @property
    def speculator(self) -> Any:
        """The RemoteSpeculator: its `times`, and why it is `lost`."""
        return self._speculator

    def _end_process(self) -> None:
        try:
            self._draft_process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._draft_process.kill()
            self._draft_process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _start_draft(settings: EngineSettings, address: str, module: str) -> subprocess.Popen[bytes]:
    # Listening before the process runs: the target can connect at once, and the two load at the same time.
    with control.listen(address) as listener:
        draft = {
            "name": "draft",
            "listener": listener.fileno(),
            "engine_args": settings.to_engine_args(),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(draft).encode())
    return process
