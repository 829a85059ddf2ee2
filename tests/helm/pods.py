"""Pods on this machine: each has network, processes and shared memory of its own, the chart's names in its hosts file,
a read-only root file system, and folders for volumes. What KubeRay adds to a pod, the command that starts Ray and
RAY_ADDRESS, is added here; the rest is the chart's, word for word but for the paths of volumes.

All of it is in namespaces of one process. So it needs no root, meets nothing else of the machine, and is gone, with all
that runs in it, when that process ends, as it does with this one.
"""

import contextlib
import math
import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from actors.local_ray import AGENT_PATIENCE
from tests.helm import forward
from tests.helm.chart import NAME, Manifest, Rendered, container

GCS_PORT, AGENT_PORT, METRICS_PORT = 6379, 52365, 8080
"""KubeRay's, of every Ray pod but the first, which is the head's."""

NOT_FOLDERS = ("/dev/shm", "/tmp")
"""Volumes that aren't folders in a pod's: the machine's own memory, and what TMPDIR names."""

START_S, END_S = 30.0, 30.0
"""For the machine; each takes a fraction of a second."""
POLL_S = 0.2

_MACHINE_OF_ITS_OWN: Final = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
)

_MACHINE: Final = """
set -e
mount -t tmpfs pods /run
mkfifo /run/ready
ip link set lo up
ip link add pods type bridge
ip addr add 10.0.0.1/24 dev pods
ip link set pods up
number=1
for pod; do
    number=$((number + 1))
    ip netns add "$pod"
    ip link add "veth$number" type veth peer name eth0 netns "$pod"
    ip link set "veth$number" master pods up
    ip -n "$pod" addr add "10.0.0.$number/24" dev eth0
    ip -n "$pod" link set eth0 up
    ip -n "$pod" link set lo up
    ip -n "$pod" route add default via 10.0.0.1
    nsenter "--net=/run/netns/$pod" unshare --mount --uts --pid --fork --mount-proc sh -c "$POD" "$0" "$pod" &
    read -r _ < /run/ready
    echo "$pod $!"
done
cat  # until those end who hold the other end
exit
"""

_POD: Final = """
set -e
hostname "$1"
mount --bind "$0/hosts" /etc/hosts
mount --bind "$0" "$0"
mount --bind "$0/$1/tmp" "$0/tmp"  # at the same path in every pod, and each pod's own
mount --bind "$VLLM_CACHE_ROOT" "$VLLM_CACHE_ROOT"
mount -t tmpfs shm /dev/shm
mount -o remount,bind,ro /
echo > /run/ready
while :; do sleep infinity || :; done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    name: str
    address: str
    folder: Path
    main: Manifest
    """Its container."""
    env: Mapping[str, str]
    enter: Sequence[str]
    """The words before a command that is run in it."""

    def local(self, text: str) -> str:
        """With folders in the place of volumes."""
        for path, folder in self.volumes.items():
            text = re.sub(rf"(?<![\w./-]){re.escape(path)}\b", str(folder), text)
        return text

    @property
    def volumes(self) -> dict[str, Path]:
        paths = [mount["mountPath"] for mount in self.main["volumeMounts"] if mount["mountPath"] not in NOT_FOLDERS]
        return {path: self.folder / path.strip("/") for path in paths}

    def start(self, command: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
        words = [*self.enter, *map(self.local, command)]
        with log.open("wb") as file:
            return subprocess.Popen(
                words, env=self.env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    def run(self, command: Sequence[str], *, deadline_s: float) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec`, or the container itself. Fails where it doesn't end."""
        return run([*self.enter, *map(self.local, command)], deadline_s=deadline_s, env=self.env)


class Machine:
    """Where the pods of a release run. Made by `machine`."""

    def __init__(self, rendered: Rendered, secrets: Mapping[tuple[str, str], str], folder: Path, names: Sequence[str]):
        self._rendered = rendered
        self._secrets = secrets
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._addresses = {name: f"10.0.0.{number}" for number, name in enumerate(names, start=2)}
        services = {f"{NAME}-head-svc": self._addresses["head"], NAME: self._addresses["gateway"]}
        hosts = {"localhost": "127.0.0.1", **self._addresses, **services}
        (folder / "hosts").write_text("".join(f"{address} {host}\n" for host, address in hosts.items()))
        for path in (folder, *(folder / name for name in names)):
            (path / "tmp").mkdir(parents=True)
        self._make_programs()
        cache = _vllm_cache()
        cache.mkdir(parents=True, exist_ok=True)
        self._machine = subprocess.Popen(
            [*_MACHINE_OF_ITS_OWN, "sh", "-c", _MACHINE, str(folder), *names],
            env={**os.environ, "POD": _POD, "VLLM_CACHE_ROOT": str(cache)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,  # what is read ahead can't be waited for
        )
        self._enter = _enter(self._machine.pid, "--user", "--preserve-credentials", "--mount", "--net")
        self._sandboxes = self._read_sandboxes()

    def pod(self, name: str, template: Manifest) -> Pod:
        folder = self._folder / name
        enter = [*self._enter, *_enter(self._sandboxes[name], "--mount", "--net", "--uts")]
        main = container(template)
        pod = Pod(name=name, address=self._addresses[name], folder=folder, main=main, env={}, enter=enter)
        for path in pod.volumes.values():
            path.mkdir(parents=True, exist_ok=True)
        for file, text in self._rendered.config.items():
            (pod.volumes["/etc/dspark-cluster/config"] / file).write_text(pod.local(text))
        env = {variable["name"]: pod.local(self._value(variable)) for variable in main["env"]}
        return replace(pod, env=self.environment | env)

    def start_ray(self, groups: Mapping[str, Manifest], *, deadline_s: float) -> dict[str, Pod]:
        """As KubeRay does: workers wait for the head. Here they wait for each other, too: Ray gives a node 30 s."""
        pods = {}
        end_s = time.monotonic() + deadline_s
        for name in sorted(groups, key=lambda name: name != "head"):
            pods[name] = self._ray_pod(name, groups[name])
            self._start_node(pods[name], _ray_start(name, groups[name]), end_s)
        return pods

    def forward(self, pod: Pod, port: int) -> str:
        """As `kubectl port-forward`: the address, of this machine's loopback, that leads to the pod's port."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            command = [*self._enter, sys.executable, forward.__file__, str(listener.fileno()), pod.address, str(port)]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()]))
            host, free_port = listener.getsockname()
        return f"{host}:{free_port}"

    def close(self) -> None:
        assert self._machine.stdin is not None
        self._machine.stdin.close()
        for process in (self._machine, *self._processes):
            process.wait(END_S)

    def _read_sandboxes(self) -> dict[str, int]:
        """Of each pod the process, by its number in the machine, whose children are the pod's."""
        found: dict[str, int] = {}
        said = ""
        with selectors.DefaultSelector() as selector:
            selector.register(self._machine.stdout, selectors.EVENT_READ)
            while found.keys() != self._addresses.keys():
                line = self._machine.stdout.readline().decode() if selector.select(START_S) else ""
                assert line, f"the machine doesn't start: {said}"
                said += line
                name, _, number = line.partition(" ")
                if name in self._addresses:
                    found[name] = int(number)
        return found

    def _ray_pod(self, name: str, group: Manifest) -> Pod:
        pod = self.pod(name, group["template"])
        address = f"127.0.0.1:{GCS_PORT}" if name == "head" else f"{NAME}-head-svc:{GCS_PORT}"
        return replace(pod, env={**pod.env, "RAY_ADDRESS": address})

    def _start_node(self, pod: Pod, command: Sequence[str], end_s: float) -> None:
        """As a kubelet does, again where it has ended, and then without what it has left running."""
        log = self._folder / f"{pod.name}.log"
        process = None
        while process is None or b"--block" not in log.read_bytes():  # the title of what it says once all is there
            if process is None or process.poll() is not None:
                subprocess.run([*pod.enter, "sh", "-c", "kill -9 -1"], check=False, timeout=START_S)
                process = pod.start(command, log=log)
                self._processes.append(process)
            assert time.monotonic() < end_s, log.read_text(errors="replace")
            time.sleep(POLL_S)

    def _make_programs(self) -> None:
        """The image's programs, of this environment."""
        folder = self._folder / "bin"
        folder.mkdir()
        programs = {"dspark-cluster": "-m actors.cli ", "ray": "-m ray.scripts.scripts ", "python": ""}
        for program, module in programs.items():
            file = folder / program
            file.write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
            file.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """Of every process: the image's programs, and what Ray asks for."""
        own = {
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(self._folder / "tmp"),
            "VLLM_CACHE_ROOT": str(_vllm_cache()),
            "GRPC_DNS_RESOLVER": "native",  # its own asks a name server alone, and here is only a hosts file
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # of its own 15 nothing is left beside other tests
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._secrets[NAME, "auth_token"],
        }
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return kept | own | dict([AGENT_PATIENCE])

    def _value(self, variable: Mapping[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        reference = variable["valueFrom"]["secretKeyRef"]
        return self._secrets[reference["name"], reference["key"]]


@contextlib.contextmanager
def machine(rendered: Rendered, secrets: Mapping[tuple[str, str], str], names: Sequence[str]) -> Iterator[Machine]:
    """With a network for each of the pods `names`. `secrets`: what is in those that the pods name, by name and key."""
    with tempfile.TemporaryDirectory(prefix="ds-", dir="/tmp") as folder:  # short: sockets lie in it
        made = Machine(rendered, secrets, Path(folder), names)
        try:
            yield made
        finally:
            made.close()


def unavailable() -> str:
    """Why such namespaces can't be had here, or nothing."""
    if missing := [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]:
        return f"no {', '.join(missing)} here (packages iproute2, util-linux)"
    attempt = "mount -t tmpfs pods /run && ip link add pods type bridge && ip netns add pod"
    probe = subprocess.run(
        [*_MACHINE_OF_ITS_OWN, "sh", "-c", attempt], capture_output=True, text=True, check=False, timeout=START_S
    )
    return "" if probe.returncode == 0 else f"no namespaces for this user ({' '.join(probe.stderr.split())})"


def run(
    words: Sequence[str], *, deadline_s: float, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Fails where it doesn't end."""
    try:
        return subprocess.run(
            words,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.output or b""  # bytes, of a text too
        pytest.fail(f"not ended in {deadline_s:g} s:\n{said.decode(errors='replace')}")


def _vllm_cache() -> Path:
    """The user's, as in other tests: without it each load of a model imports vLLM twice more, to look at its class."""
    return Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser()


def _enter(process: int, *namespaces: str) -> list[str]:
    """The words before a command that is run as if a child of the process."""
    return ["nsenter", f"--target={process}", *namespaces, f"--pid=/proc/{process}/ns/pid_for_children"]


def _ray_start(name: str, group: Manifest) -> list[str]:
    """KubeRay's command line."""
    parameters = dict(group["rayStartParams"])
    parameters.setdefault("num-cpus", str(_cpus(container(group["template"])["resources"])))
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
    return ["ray", "start", *(f"--{key}={value}" if value else f"--{key}" for key, value in parameters.items())]


def _cpus(resources: Manifest) -> int:
    text = str({**resources.get("requests", {}), **resources.get("limits", {})}["cpu"])
    return math.ceil(float(text[:-1]) / 1000 if text.endswith("m") else float(text))
