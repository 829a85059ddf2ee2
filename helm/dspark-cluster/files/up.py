"""up.py CONFIG RUN HOST PORT: see to it that a gateway serves at HOST:PORT, of a cluster with the settings CONFIG.

Ray runs `dspark-cluster up` once, as the job RUN, and this waits for its end. Who asks again waits for the same run, so
this may be interrupted and repeated. What failed, or serves no longer and has no gateway, is run anew; a head that was
lost has forgotten its runs. Another RUN takes the place of the cluster that is there.

Runs outside Ray, in a pod with RAY_API_SERVER_ADDRESS.
"""

import asyncio
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_actors

from actors.names import GATEWAY
from cluster.config import load_config

ENTRYPOINT = "dspark-cluster down && dspark-cluster up cluster.yaml"

POLL_S = 5.0
NO_AGENT = "No available agent"
"""What Ray answers while its head starts."""

MOVE_S = 180.0
"""For the gateway's pod to be moved, and the gateway to start again in it."""


def main(config: str, run: str, host: str, port: str) -> int:
    client = connect()
    status = status_of(client, run)
    if status is JobStatus.SUCCEEDED and (serves(host, int(port)) or comes_back(Path(config))):
        return 0
    if status not in (JobStatus.PENDING, JobStatus.RUNNING):
        if status is not None:
            client.delete_job(run)
        submit(client, run, Path(config))
    asyncio.run(follow(client, run))
    return 0 if status_of(client, run) is JobStatus.SUCCEEDED else 1


def connect() -> JobSubmissionClient:
    while True:
        try:
            return JobSubmissionClient()
        except ConnectionError as error:
            print(f"waiting for Ray ({' '.join(str(error).split())})", flush=True)
            time.sleep(POLL_S)


def status_of(client: JobSubmissionClient, run: str) -> JobStatus | None:
    """None where Ray knows of no such job."""
    known = {job.submission_id: job.status for job in client.list_jobs()}
    return known.get(run)


def serves(host: str, port: int) -> bool:
    deadline_s = time.monotonic() + MOVE_S
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection((host, port), timeout=POLL_S).close()
            return True
        except OSError:
            time.sleep(POLL_S)
    return False


def comes_back(config: Path) -> bool:
    """Whether the cluster still has its gateway. Ray starts again what it has lost, and nobody is sent to a gateway
    whose replicas load: to start the cluster again would only end that."""
    namespace = load_config(config).ray.namespace
    wanted = [("ray_namespace", "=", namespace), ("name", "=", GATEWAY), ("state", "!=", "DEAD")]
    gateways = list_actors(filters=wanted)
    for gateway in gateways:
        print(f"not reached, but Ray has the gateway ({gateway.state}): the cluster comes back by itself", flush=True)
    return bool(gateways)


def submit(client: JobSubmissionClient, run: str, config: Path) -> None:
    """With the settings of this pod, which may be newer than the head's."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(config, Path(folder) / "cluster.yaml")
        while True:
            try:
                client.submit_job(submission_id=run, entrypoint=ENTRYPOINT, runtime_env={"working_dir": folder})
                return
            except RuntimeError as error:
                if status_of(client, run) is not None:
                    print(f"another has submitted it since ({error})", flush=True)
                    return
                if NO_AGENT not in str(error):
                    raise
            print("waiting for Ray's agent of the head", flush=True)
            time.sleep(POLL_S)


async def follow(client: JobSubmissionClient, run: str) -> None:
    async for lines in client.tail_job_logs(run):
        print(lines, end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
