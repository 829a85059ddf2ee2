"""`make` ends in one clear line where the machine isn't fit for it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "requirements" / "install.py"


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("install: ")]
    assert "Traceback" not in result.stderr
    return lines[-1]


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_a_python_that_is_too_old_or_too_new(version: tuple[int, int]) -> None:
    code = (
        f"import runpy, sys; sys.version_info = {(*version, 0)}; sys.argv = ['install.py'];"
        f" runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    assert "dspark-cluster needs 3.11 to 3.13" in one_line(run(sys.executable, "-c", code))


def test_its_syntax_is_that_of_python_3_6() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


def test_a_python_without_the_venv_module() -> None:
    code = (
        "import importlib.util, runpy, sys; find = importlib.util.find_spec; sys.argv = ['install.py'];"
        " importlib.util.find_spec = lambda name: None if name == 'ensurepip' else find(name);"
        f" runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    assert "lacks the module ensurepip; install it" in one_line(run(sys.executable, "-c", code))


def test_no_python_at_all() -> None:
    assert "there is no python9" in one_line(run("make", "install", "PYTHON=python9"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Whose locks name a package that isn't there."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "install.py").write_text(SCRIPT.read_text())
    for profile in ("cpu", "gpu"):
        (tmp_path / "requirements" / f"{profile}.txt").write_text("no-such-package-for-dspark==1.0\n")
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


def install_from_nowhere(checkout: Path, *profile: str) -> subprocess.CompletedProcess[str]:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    return run(sys.executable, checkout / "requirements" / "install.py", *profile, **nowhere)


def test_an_index_that_cannot_be_reached(checkout: Path) -> None:
    line = one_line(install_from_nowhere(checkout))
    assert "requirements/cpu.txt: pip says: No matching distribution found" in line
    assert "check the network" in line
    assert not (checkout / ".venv" / "installed").exists()


def installed(checkout: Path, profile: str) -> Path:
    """An environment of that profile, with an older lock; returns a file in it."""
    subprocess.run([sys.executable, "-m", "venv", checkout / ".venv"], check=True)
    (checkout / ".venv" / "installed").write_text(f"0123 {profile} {sys.version.split()[0]}")
    (checkout / ".venv" / "kept").touch()
    return checkout / ".venv" / "kept"


def test_another_profile_makes_the_environment_anew(checkout: Path) -> None:
    """vLLM's builds for CPU and GPU would lie in it side by side, and it would pass for either."""
    kept = installed(checkout, "cpu")
    result = install_from_nowhere(checkout, "gpu")
    assert "making .venv for the profile gpu" in result.stderr
    assert not kept.exists()


def test_without_a_profile_it_stays_what_it_is(checkout: Path) -> None:
    kept = installed(checkout, "gpu")
    line = one_line(install_from_nowhere(checkout))
    assert "requirements/gpu.txt: " in line
    assert kept.exists()
