"""CUDA's Multi-Process Service (MPS), for processes that share a GPU.

Without it a GPU works for one process at a time, and a round of a draft and a target that share one has two changes
between them, 0.28 ms together on an H200. With it there are none, but each kernel of either starts a little later.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cluster.errors import UserError

_PROGRAM: Final = "nvidia-cuda-mps-control"
_TIMEOUT_S: Final = 20.0


@contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """A daemon of our own; yields the variables of a process that is to be its client, before it starts.

    Raises:
        UserError: the driver's control program isn't there, or doesn't start the daemon.
    """
    program = shutil.which(_PROGRAM)
    if program is None:
        raise UserError(
            "--mps", f"there is no {_PROGRAM}", "install it, it comes with NVIDIA's driver, or leave --mps out"
        )
    with tempfile.TemporaryDirectory(prefix="dspark-mps-") as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        _control(program, ["-d"], variables)
        try:
            yield variables
        finally:
            _control(program, [], variables, "quit\n")


def _control(program: str, arguments: list[str], variables: dict[str, str], said: str = "") -> None:
    try:
        subprocess.run(
            [program, *arguments],
            env=os.environ | variables,
            input=said,
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        raise UserError(
            "--mps", f"{_PROGRAM} failed: {(error.stderr or error.stdout).strip()}", "leave --mps out"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError("--mps", f"{_PROGRAM} took more than {_TIMEOUT_S:.0f} s", "leave --mps out") from error
