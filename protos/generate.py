"""Generate Python code and its types from every .proto here: into this folder, or into the one given."""

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

SOURCES = Path(__file__).resolve().parent


def main() -> int:
    output = sys.argv[1] if len(sys.argv) > 1 else str(SOURCES)
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    # Beside this Python, which need not be the one that the shell finds.
    plugins = (
        f"protoc-gen-{name}={Path(sys.executable).with_name(f'protoc-gen-{name}')}" for name in ("mypy", "mypy_grpc")
    )
    return int(
        protoc.main(
            [
                "protoc",
                f"--proto_path={SOURCES}",
                f"--proto_path={well_known}",
                *(f"--plugin={plugin}" for plugin in plugins),
                *(f"--{kind}_out={output}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")),
                *(str(source) for source in sorted(SOURCES.rglob("*.proto"))),
            ]
        )
    )


if __name__ == "__main__":
    sys.exit(main())
