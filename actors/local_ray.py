"""A Ray of this machine's own: started for a cluster that is given none, and stopped with it.

It takes only those who hold its token, which, like all its files, is in one folder of the user's: Ray makes a token by
default too, but leaves it in the home folder. `ray stop` would end every Ray process of the user; here only those of
this one end.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from actors.ports import free_port
from cluster.cache import cache_dir
from cluster.channel.process import ProcessIdentity
from cluster.channel.segment import remove_orphans
from cluster.errors import UserError

_HOST: Final = "127.0.0.1"

_START_TIMEOUT_S: Final = 120.0
"""It takes 6 s on an idle machine of two cores, and 30 s where others start too."""

AGENT_PATIENCE: Final = ("RAY_agent_register_timeout_ms", "120000")
"""Of the environment: a node ends whose agents aren't there by then. Ray's own 15 s are too few on a busy machine."""

_PORTS_TRIED: Final = 3

_REASON_CHARACTERS: Final = 300

_STOP_TIMEOUT_S: Final = 45.0
"""It takes 4 s. A Ray that still has actors waits 30 s for them."""

_OBJECT_STORE_BYTES: Final = 128 << 20
"""Of /dev/shm. What passes through Ray here are tokens; its own default is a third of the memory."""

_RAY_START: Final = (
    sys.executable,
    "-m",
    "ray.scripts.scripts",
    "start",
    "--head",
    "--block",
    f"--node-ip-address={_HOST}",
    "--include-dashboard=false",
    "--disable-usage-stats",
    f"--object-store-memory={_OBJECT_STORE_BYTES}",
    # Free ports: Ray's own choices are fixed, and a second Ray on the machine would end for them.
    "--dashboard-agent-listen-port=0",
    "--min-worker-port=0",
    "--max-worker-port=0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRay:
    """One that runs."""

    pid: int
    """Of `ray start`, which leads a session of its own, and ends its processes when it ends."""
    start_ticks: int
    address: str
    folder: str

    @property
    def _process(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks)

    def use_token(self) -> None:
        """Let this process, and those it starts, in."""
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(Path(self.folder) / "token")
        # As Ray itself does when it turns tokens on: it read the environment when it was imported.
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()

    def stop(self) -> None:
        """End its processes, and remove what it has written."""
        if self._process.exists():
            os.kill(self.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while processes := self._processes():
            if time.monotonic() > deadline_s:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        remove_orphans()  # of engines that ended a moment ago
        shutil.rmtree(self.folder, ignore_errors=True)
        _record().unlink(missing_ok=True)

    def _processes(self) -> list[int]:
        with contextlib.suppress(ProcessLookupError):
            if ProcessIdentity.of(self.pid) != self._process:
                return []  # the number is another's now, which it can't become before the session has ended
        return _session(self.pid)


def find_local_ray() -> LocalRay | None:
    """The one that runs, if one does."""
    try:
        found = LocalRay(**json.loads(_record().read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None
    if found._process.exists():
        return found
    found.stop()  # what it left behind
    return None


def start_local_ray() -> LocalRay:
    """Start one, and wait until it can be joined.

    Raises:
        UserError: it ends, or doesn't come up; with what it wrote last.
    """
    for _ in range(_PORTS_TRIED):
        with contextlib.suppress(_PortTaken):
            return _start(free_port(_HOST))
    raise UserError(
        "Ray on this machine", f"others took {_PORTS_TRIED} ports before it could listen there", "start it again"
    )


class _PortTaken(Exception):  # noqa: N818 - it names what happened
    """By another process, after it was found to be free: Ray listens some seconds later."""


def _start(port: int) -> LocalRay:
    """As `start_local_ray`, on this port. Raises _PortTaken, too."""
    folder = Path(tempfile.mkdtemp(prefix="dspark-ray-", dir="/tmp"))  # short: sockets lie in it
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    log = folder / "ray.log"
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)} | dict([AGENT_PATIENCE])
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_RAY_START, f"--port={port}", f"--ray-client-server-port={free_port(_HOST)}", f"--temp-dir={folder}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    identity = ProcessIdentity.of(process.pid)
    local = LocalRay(pid=identity.pid, start_ticks=identity.start_ticks, address=f"{_HOST}:{port}", folder=str(folder))
    record = _record()
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(asdict(local)), encoding="utf-8")
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    # The title of what it says once all is there.
    while "--block" not in (written := log.read_text(encoding="utf-8", errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline_s:
            local.stop()
            if f"The specified port is {port}." in written:
                raise _PortTaken
            raise UserError(
                "Ray on this machine", f"it did not start ({_reason(written)})", "mend that, or join one by --address"
            )
        time.sleep(0.05)
    return local


def _reason(written: str) -> str:
    """The last line of Ray's that names an error, or else the last one."""
    lines = [line.strip() for line in written.splitlines() if line.strip()]
    errors = [line for line in lines if re.search("error|failed", line, re.IGNORECASE)]
    return (errors or lines or ["it says nothing"])[-1][:_REASON_CHARACTERS]


def _record() -> Path:
    return cache_dir() / "local-ray.json"


def _session(leader: int) -> list[int]:
    """The processes of a session that are still there, those that wait to be collected left out."""
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, session, *_ = stat[stat.rindex(b")") + 2 :].split()
        if int(session) == leader and state not in (b"Z", b"X"):
            members.append(int(folder.name))
    return members
