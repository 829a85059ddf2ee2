"""The generated code that is committed is what its .proto files say."""

import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).parents[2] / "protos"


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROTOS / "generate.py", tmp_path], check=True)
    generated = {path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*.py*")}
    committed = {path.relative_to(PROTOS) for path in PROTOS.rglob("*_pb2*.py*") if path.suffix != ".pyc"}
    assert generated == committed, "run `make protos`"
    for path in sorted(generated):
        assert (tmp_path / path).read_text() == (PROTOS / path).read_text(), f"{path}: run `make protos`"
    assert generated
