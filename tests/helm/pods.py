"""Pods as processes of this machine: a network namespace for each, with the chart's names in its hosts file, the root
file system read-only, volumes as folders. What KubeRay adds to a pod, the command that starts Ray and RAY_ADDRESS, is
added here; the rest is the chart's, word for word but for the paths of volumes."""

import contextlib
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helm.chart import NAME, Manifest, Rendered, container

GCS_PORT, AGENT_PORT, METRICS_PORT = 6379, 52365, 8080
"""KubeRay's, of every Ray pod but the first, which is the head's."""

NOT_FOLDERS = ("/dev/shm", "/tmp")
"""Volumes that aren't folders in a pod's: the machine's own memory, and what TMPDIR names."""

_ENTER = """
set -e
mount -o remount,bind,ro /
mount --bind "$0" "$0"
mount -o remount,bind,rw "$0"
mount --bind "$1/tmp" "$0/tmp"  # at the same path in every pod, and each pod's own
shift
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    address: str
    folder: Path
    namespace: str
    main: Manifest
    """Its container."""
    env: Mapping[str, str]

    def local(self, text: str) -> str:
        """With folders in the place of volumes."""
        for path, folder in _volumes(self.main, self.folder).items():
            text = re.sub(rf"(?<![\w./-]){re.escape(path)}\b", str(folder), text)
        return text

    def start(
        self, command: Sequence[str], *, output: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(
                self._within(command),
                env=self.env | (env or {}),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(
        self, command: Sequence[str], *, deadline_s: float, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._within(command),
            env=self.env | (env or {}),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline_s,
            check=False,
        )

    def _within(self, command: Sequence[str]) -> list[str]:
        folders = [str(self.folder.parent), str(self.folder)]
        return ["ip", "netns", "exec", self.namespace, "bash", "-c", _ENTER, *folders, *map(self.local, command)]


class Machine:
    """Where the pods run, from `open` to the end of its block."""

    def __init__(self, rendered: Rendered, secrets: Mapping[tuple[str, str], str]) -> None:
        """`secrets`: what is in the secrets that the pods name, by name and key."""
        self._rendered = rendered
        self._secrets = secrets
        self._folder = Path(tempfile.mkdtemp(prefix="ds-", dir="/tmp"))  # short: sockets lie in it
        self._tag = f"ds{os.getpid() % 1_000_000}"
        self._subnet = f"10.{64 + os.getpid() // 256 % 64}.{os.getpid() % 256}"
        self._addresses: dict[str, str] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._make_programs()

    @contextlib.contextmanager
    def open(self, names: Sequence[str]) -> Iterator[None]:
        """With a namespace for each pod."""
        try:
            _ip("link", "add", self._tag, "type", "bridge")
            _ip("addr", "add", f"{self._subnet}.1/24", "dev", self._tag)
            _ip("link", "set", self._tag, "up")
            self._addresses = {name: f"{self._subnet}.{number}" for number, name in enumerate(names, start=2)}
            for name, address in self._addresses.items():
                self._make_namespace(name, address)
            yield
        finally:
            self._close()

    def pod(self, name: str, template: Manifest) -> Pod:
        main = container(template)
        folder = self._folder / name
        for path in (folder / "tmp", *_volumes(main, folder).values()):
            path.mkdir(parents=True, exist_ok=True)
        pod = Pod(address=self._addresses[name], folder=folder, namespace=self._namespace(name), main=main, env={})
        for file, text in self._rendered.config.items():
            (_volumes(main, folder)["/etc/dspark-cluster/config"] / file).write_text(pod.local(text))
        env = {variable["name"]: pod.local(self._value(variable)) for variable in main["env"]}
        return Pod(
            address=pod.address, folder=folder, namespace=pod.namespace, main=main, env=self._environment() | env
        )

    def start_ray(self, name: str, group: Manifest) -> Pod:
        """As KubeRay does."""
        pod = self.pod(name, group["template"])
        parameters = dict(group["rayStartParams"])
        parameters.setdefault("num-cpus", str(_cpus(pod.main["resources"])))
        parameters |= {
            "dashboard-agent-listen-port": str(AGENT_PORT),
            "metrics-export-port": str(METRICS_PORT),
            "labels": ",".join(f"{key}={value}" for key, value in group["labels"].items()),
            "block": "",
        }
        if name == "head":
            parameters |= {"head": "", "port": str(GCS_PORT)}
        else:
            parameters["address"] = f"{NAME}-head-svc:{GCS_PORT}"
        options = [f"--{key}={value}" if value else f"--{key}" for key, value in parameters.items()]
        env = self.ray_address(name)
        self._processes.append(pod.start(["ray", "start", *options], output=self._folder / f"{name}.log", env=env))
        return pod

    def ray_address(self, name: str) -> dict[str, str]:
        """What KubeRay tells a container."""
        return {"RAY_ADDRESS": f"127.0.0.1:{GCS_PORT}" if name == "head" else f"{NAME}-head-svc:{GCS_PORT}"}

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def _make_programs(self) -> None:
        """The image's programs, of this environment."""
        folder = self._folder / "bin"
        folder.mkdir()
        programs = {"dspark-cluster": "-m actors.cli ", "ray": "-m ray.scripts.scripts ", "python": ""}
        for program, module in programs.items():
            file = folder / program
            file.write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
            file.chmod(0o755)

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        temporary = self._folder / "tmp"
        temporary.mkdir(exist_ok=True)
        own = {
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(temporary),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._secrets[NAME, "auth_token"],
        }
        return kept | own

    def _value(self, variable: Mapping[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        reference = variable["valueFrom"]["secretKeyRef"]
        return self._secrets[reference["name"], reference["key"]]

    def _make_namespace(self, name: str, address: str) -> None:
        namespace = self._namespace(name)
        number = address.rpartition(".")[2]
        _ip("netns", "add", namespace)
        _ip("link", "add", f"{self._tag}v{number}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", f"{self._tag}v{number}", "master", self._tag, "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", namespace, "link", "set", device, "up")
        _ip("-n", namespace, "route", "add", "default", "via", f"{self._subnet}.1")
        services = {f"{NAME}-head-svc": self._addresses["head"], NAME: self._addresses["gateway"]}
        hosts = {"localhost": "127.0.0.1", socket.gethostname(): address, **services}
        folder = Path("/etc/netns") / namespace
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("".join(f"{where} {host}\n" for host, where in hosts.items()))

    def _namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _close(self) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        for name in self._addresses:
            namespace = self._namespace(name)
            left = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
            for pid in left.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._tag], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


def unavailable() -> str:
    """Why namespaces can't be had here, or nothing."""
    if shutil.which("ip") is None:
        return "there is no ip (package iproute2)"
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else f"network namespaces need root ({probe.stderr.strip()})"


def _volumes(main: Manifest, folder: Path) -> dict[str, Path]:
    paths = [mount["mountPath"] for mount in main["volumeMounts"] if mount["mountPath"] not in NOT_FOLDERS]
    return {path: folder / path.strip("/") for path in paths}


def _cpus(resources: Manifest) -> int:
    text = str({**resources.get("requests", {}), **resources.get("limits", {})}["cpu"])
    return math.ceil(float(text[:-1]) / 1000 if text.endswith("m") else float(text))


def _ip(*words: str) -> None:
    result = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"ip {' '.join(words)}: {result.stderr}"
