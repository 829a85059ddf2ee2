"""Make `.venv` and install what the lock file says, when that has changed. Standard library only.

    python3 requirements/install.py [cpu|gpu]

It runs before anything is installed, under whatever `python3` is, so it keeps to what Python 3.6 can read: a Python
that is too old must still say so.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys

OLDEST, NEWEST = (3, 11), (3, 13)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "installed")
LOG = os.path.join(VENV, "install.log")
# The package index has only the CUDA build of torch; PyTorch's own index has the CPU build. It is asked only where
# the configured indexes don't have it, since pip would otherwise ask it for every package.
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def main(arguments):
    profile = arguments[0] if arguments else "cpu"
    if len(arguments) > 1 or profile not in ("cpu", "gpu"):
        fail("arguments {}".format(" ".join(arguments)), "the profiles are cpu and gpu", "name one of them")
    check_python()
    lock = os.path.join(ROOT, "requirements", profile + ".txt")
    fingerprint = digest([lock, os.path.join(ROOT, "pyproject.toml")]) + " " + sys.version.split()[0]
    if read(STAMP) == fingerprint:
        return
    if not os.path.exists(PYTHON) or read(STAMP).split(" ")[-1] != sys.version.split()[0]:
        say("making {} with Python {}".format(os.path.relpath(VENV), sys.version.split()[0]))
        run([sys.executable, "-m", "venv", "--clear", VENV], "the virtual environment can't be made")
    install(lock)
    run(pip("--no-build-isolation", "--editable", ROOT), "dspark-cluster can't be installed")
    with open(STAMP, "w") as stamp:
        stamp.write(fingerprint)
    say("done")


def check_python():
    found = "Python {}".format(sys.version.split()[0])
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        fail(
            found,
            "dspark-cluster needs 3.{} to 3.{}".format(OLDEST[1], NEWEST[1]),
            "run `make PYTHON=/path/to/python3.12 ...`",
        )
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            fail(
                found,
                "it lacks the module " + module,
                "install it (on Debian and Ubuntu: apt install python3-venv)",
            )


def install(lock):
    """Install the lock's packages, without resolving and without compiling anything."""
    with open(lock) as lines:
        total = sum(1 for line in lines if "==" in line and not line.lstrip().startswith("#"))
    arguments = ("--no-compile", "--only-binary=:all:", "-r", lock)
    code, output = pip_with_progress(pip(*arguments), total)
    if code != 0 and "No matching distribution found for torch==" in output:
        code, output = pip_with_progress(pip("--extra-index-url", CPU_TORCH_INDEX, *arguments), total)
    if code != 0:
        errors = [line for line in output.splitlines() if line.startswith("ERROR")]
        fail(
            os.path.relpath(lock),
            "pip says: " + (errors[-1][len("ERROR: ") :] if errors else "exit code {}".format(code)),
            "check the network and the index in `pip config list`; all it said is in " + os.path.relpath(LOG),
        )


def pip(*arguments):
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--retries=2", "--progress-bar=off"]
    return [PYTHON, "-m", "pip", "install"] + options + list(arguments)


def pip_with_progress(command, total):
    """Run pip and count its packages on one line; returns its exit code and all it said."""
    output, count = [], 0
    with open(LOG, "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
        for line in process.stdout:
            output.append(line)
            log.write(line)
            if line.startswith("Collecting "):
                count += 1
                show("package {} of about {}: {}".format(count, total, line.split()[1]))
            elif line.startswith("Installing collected"):
                show("unpacking {} packages; this takes a minute or two".format(count))
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    return process.wait(), "".join(output)


def run(command, what):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    if result.returncode != 0:
        lines = result.stdout.strip().splitlines() or ["exit code {}".format(result.returncode)]
        fail(what, lines[-1], "mend that and run make again")


def show(text):
    """A line that the next one replaces; on something that is no terminal, only the milestones."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[Kinstall: " + text[:100])
        sys.stderr.flush()
    elif not text.startswith("package") or text.split()[1] in ("1", "50", "100", "150"):
        say(text)


def say(text):
    sys.stderr.write("install: " + text + "\n")


def fail(what, why, remedy):
    say("{}: {}; {}".format(what, why, remedy))
    sys.exit(2)


def digest(paths):
    sha = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            sha.update(file.read())
    return sha.hexdigest()


def read(path):
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read().strip()


if __name__ == "__main__":
    main(sys.argv[1:])
