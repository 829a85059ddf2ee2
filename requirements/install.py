"""Make `.venv` and install what the lock file says, when that has changed. Standard library only.

    python3 requirements/install.py [cpu|gpu]

Without a profile it is the one that is installed, and cpu the first time. Another one than that, or another Python,
makes `.venv` anew: vLLM's two builds are two distributions of the same modules.

It starts before anything is installed, under whatever `python3` is, so its syntax is that of Python 3.6: a Python
that is too old must still get as far as saying so.
"""

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)
PROFILES = "cpu", "gpu"
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed"
LOG = VENV / "install.log"
VERSION = sys.version.split()[0]
# The package index has only the CUDA build of torch; PyTorch's own index has the CPU build. It is asked only where
# the configured indexes don't have it, since pip would otherwise ask it for every package.
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def main(arguments):
    installed = STAMP.read_text().strip() if STAMP.exists() else ""
    profile = arguments[0] if arguments else installed_profile(installed)
    if len(arguments) > 1 or profile not in PROFILES:
        fail(f"arguments {' '.join(arguments)}", "the profiles are cpu and gpu", "name one of them")
    check_python()
    lock = ROOT / "requirements" / f"{profile}.txt"
    fingerprint = f"{digest([lock, ROOT / 'pyproject.toml'])} {profile} {VERSION}"
    if installed == fingerprint:
        return
    if not PYTHON.exists() or not installed.endswith(f" {profile} {VERSION}"):
        say(f"making {VENV.name} for the profile {profile} with Python {VERSION}")
        run([sys.executable, "-m", "venv", "--clear", VENV], "the virtual environment can't be made")
    install(lock)
    run([*pip_install(), "--no-build-isolation", "--editable", ROOT], "dspark-cluster can't be installed")
    STAMP.write_text(fingerprint)
    say("done")


def installed_profile(stamp):
    words = stamp.split()
    return words[1] if len(words) == 3 else PROFILES[0]


def check_python():
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        needed = f"dspark-cluster needs 3.{OLDEST[1]} to 3.{NEWEST[1]}"
        fail(f"Python {VERSION}", needed, "name one that is there: make PYTHON=python3.12 ...")
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            remedy = "install it (Debian and Ubuntu: apt install python3-venv)"
            fail(f"Python {VERSION}", f"it lacks the module {module}", remedy)


def install(lock):
    """Install the lock's packages, without resolving and without compiling anything."""
    # Python compiles a module when it is first imported; to compile all of them now takes longer than the download.
    command = [*pip_install(), "--no-compile", "--only-binary=:all:", "-r", lock]
    code, output = with_progress(command)
    if code != 0 and "No matching distribution found for torch==" in output:
        code, output = with_progress([*command, "--extra-index-url", CPU_TORCH_INDEX])
    if code != 0:
        errors = [line[len("ERROR: ") :] for line in output.splitlines() if line.startswith("ERROR: ")]
        why = f"pip says: {errors[-1] if errors else f'exit code {code}'}"
        remedy = f"check the network and the index in `pip config list`; all that pip said is in {LOG}"
        fail(f"requirements/{lock.name}", why, remedy)


def pip_install():
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--retries=2", "--progress-bar=off"]
    return [PYTHON, "-m", "pip", "install", *options]


def with_progress(command):
    """Run pip and show how far it is on one line; returns its exit code and all it said."""
    output, count = [], 0
    with LOG.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in process.stdout:
            output.append(line)
            log.write(line)
            if line.startswith("Collecting "):
                count += 1
                show(f"package {count}: {line.split()[1]}", milestone=count % 50 == 1)
            elif line.startswith("Installing collected"):
                show(f"unpacking {count} packages; this takes a minute or two", milestone=True)
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    return process.wait(), "".join(output)


def run(command, what):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        lines = result.stdout.strip().splitlines()
        fail(what, lines[-1] if lines else f"exit code {result.returncode}", "mend that and run make again")


def show(text, milestone):
    """On a terminal, a line that the next one replaces; elsewhere only the milestones."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[Kinstall: {text[:100]}")
        sys.stderr.flush()
    elif milestone:
        say(text)


def say(text):
    sys.stderr.write(f"install: {text}\n")


def fail(what, why, remedy):
    say(f"{what}: {why}; {remedy}")
    sys.exit(2)


def digest(paths):
    sha = hashlib.sha256()
    for path in paths:
        sha.update(path.read_bytes())
    return sha.hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
