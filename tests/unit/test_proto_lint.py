"""The .proto files follow buf's STANDARD lint rules; the public one has a comment on everything."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc_tools
import pytest
from google.protobuf import descriptor_pb2 as d
from grpc_tools import protoc

PROTOS = Path(__file__).parents[2] / "protos"
PUBLIC = "dspark/v1/generation.proto"

PASCAL = re.compile(r"[A-Z][A-Za-z0-9]*")
SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[d.FileDescriptorProto]:
    output = tmp_path_factory.mktemp("protos") / "set"
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    paths = [f"--proto_path={PROTOS}", f"--proto_path={well_known}"]
    assert protoc.main(["protoc", *paths, "--include_source_info", f"--descriptor_set_out={output}", *sources]) == 0
    return list(d.FileDescriptorSet.FromString(output.read_bytes()).file)


def messages(file: d.FileDescriptorProto) -> Iterator[d.DescriptorProto]:
    waiting = list(file.message_type)
    while waiting:
        message = waiting.pop()
        if not message.options.map_entry:
            yield message
        waiting.extend(message.nested_type)


def enums(file: d.FileDescriptorProto) -> Iterator[d.EnumDescriptorProto]:
    yield from file.enum_type
    for message in messages(file):
        yield from message.enum_type


def upper_snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()


def test_packages_are_versioned_and_lie_in_their_directories(files: list[d.FileDescriptorProto]) -> None:
    assert files
    for file in files:
        assert file.syntax == "proto3", file.name
        assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*\.v[1-9][0-9]*", file.package), file.name
        assert str(Path(file.name).parent) == file.package.replace(".", "/")
        assert SNAKE.fullmatch(Path(file.name).stem)
        assert not file.public_dependency


def test_names_have_their_case(files: list[d.FileDescriptorProto]) -> None:
    for file in files:
        for message in messages(file):
            assert PASCAL.fullmatch(message.name)
            named = [*message.field, *(oneof for oneof in message.oneof_decl if not oneof.name.startswith("_"))]
            for part in named:
                assert SNAKE.fullmatch(part.name), f"{message.name}.{part.name}"


def test_enums_begin_with_unspecified_and_prefix_their_values(files: list[d.FileDescriptorProto]) -> None:
    for file in files:
        for enum in enums(file):
            assert PASCAL.fullmatch(enum.name)
            assert (enum.value[0].number, enum.value[0].name) == (0, f"{upper_snake(enum.name)}_UNSPECIFIED")
            assert not enum.options.allow_alias
            for value in enum.value:
                assert UPPER.fullmatch(value.name)
                assert value.name.startswith(f"{upper_snake(enum.name)}_"), value.name


def test_services_and_their_types_are_named_for_their_methods(files: list[d.FileDescriptorProto]) -> None:
    used: Counter[str] = Counter()
    for file in files:
        for service in file.service:
            assert PASCAL.fullmatch(service.name)
            assert service.name.endswith("Service")
            for method in service.method:
                assert PASCAL.fullmatch(method.name)
                for kind, suffix in ((method.input_type, "Request"), (method.output_type, "Response")):
                    used[kind] += 1
                    assert kind.rpartition(".")[2] in (f"{method.name}{suffix}", f"{service.name}{method.name}{suffix}")
    assert set(used.values()) == {1}


def test_everything_public_has_a_comment(files: list[d.FileDescriptorProto]) -> None:
    file = next(file for file in files if file.name == PUBLIC)
    commented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}
    number = d.FileDescriptorProto.DESCRIPTOR.fields_by_name
    places = {(number["message_type"].number, i): each for i, each in enumerate(file.message_type)}
    places |= {(number["enum_type"].number, i): each for i, each in enumerate(file.enum_type)}
    places |= {(number["service"].number, i): each for i, each in enumerate(file.service)}
    for path, each in list(places.items()):
        # Fields, values and methods all have field number 2 in their descriptors; oneofs have 8.
        for attribute, inner in (("field", 2), ("value", 2), ("method", 2), ("oneof_decl", 8)):
            parts = enumerate(getattr(each, attribute, ()))
            places |= {(*path, inner, i): part for i, part in parts if not part.name.startswith("_")}
    assert [place.name for path, place in places.items() if path not in commented] == []
