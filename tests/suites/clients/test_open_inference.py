"""The protocol against its upstream: stubs of its working group call a suite, and all declarations are the same."""

from __future__ import annotations

import base64
from collections.abc import Iterable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from quire.kserve.v2 import kserve_pb2
from tests.suites.clients.other_python import answers_of, need_clients
from tests.suites.clients.served import Served
from tests.support.suite import greedy

# Triton's additions to the protocol.
STREAMING = {"ModelStreamInfer", "ModelConfig"}


@pytest.fixture(scope="session", autouse=True)
def clients() -> None:
    """Check for the clients before a suite is started for them."""
    need_clients()


def test_the_working_groups_stubs_are_answered_in_typed_contents(served: Served) -> None:
    prompt = [5, 6, 7]
    own = served.run(lambda suite: suite.generate(greedy(prompt, 6)))
    given = {"address": served.address, "model": served.model, "prompt": prompt}
    found = answers_of("open_inference_calls.py", given)
    assert found["ready"] == [True, True, True]
    assert found["inputs"]["input_ids"] == ["INT32", [-1]]
    assert (found["id"], found["text"], found["ids"]) == ("7", [own.text], own.tokens)
    assert found["error"][0] == "INVALID_ARGUMENT"
    assert "sampling_parameters.n: is 0; expected" in found["error"][1]


def test_the_wire_is_that_of_tritonclient() -> None:
    """Every field, method and enum value is present: name, number, type and label."""
    theirs = files(answers_of("triton_calls.py", {"wire": True})["wire"])
    ours = declared()
    fields, numbers = dict(fields_of(ours.message_type)), values(ours)
    assert (len(fields), len(numbers)) == (86, 6)
    known = {name: facts for file in theirs for name, facts in fields_of(file.message_type)}
    assert fields == {name: known.get(name) for name in fields}
    assert methods(ours) <= set[object]().union(*map(methods, theirs))
    assert numbers <= set[object]().union(*map(values, theirs))


def test_the_wire_is_that_of_the_working_group() -> None:
    """Every message that both have is the same, and so is every method but those that Triton added."""
    (theirs,) = files(answers_of("open_inference_calls.py", {"wire": True})["wire"])
    ours, known = declared(), dict(fields_of(theirs.message_type))
    shared = {name: facts for name, facts in fields_of(ours.message_type) if name.split(".")[0] in messages(theirs)}
    assert len(shared) > 40
    assert shared == {name: known.get(name) for name in shared}
    assert {name for _, name, *_ in methods(ours) - methods(theirs)} == STREAMING


def declared() -> FileDescriptorProto:
    ours = FileDescriptorProto()
    kserve_pb2.DESCRIPTOR.CopyToProto(ours)
    return ours


def files(packed: list[str]) -> list[FileDescriptorProto]:
    """Return the files of the other client that belong to Quire's package."""
    read = [FileDescriptorProto.FromString(base64.b64decode(each)) for each in packed]
    assert {each.package for each in read} == {"inference"}
    return read


def messages(file: FileDescriptorProto) -> set[str]:
    return {each.name for each in file.message_type}


def methods(file: FileDescriptorProto) -> set[tuple[str | bool, ...]]:
    """Return service and name of each method; what it takes and gives, and which of them it streams."""
    return {
        (
            *(service.name, method.name, method.input_type, method.output_type),
            *(method.client_streaming, method.server_streaming),
        )
        for service in file.service
        for method in service.method
    }


def values(file: FileDescriptorProto) -> set[tuple[str, str, int]]:
    return {(each.name, value.name, value.number) for each in file.enum_type for value in each.value}


def fields_of(found: Iterable[DescriptorProto], within: str = "") -> Iterable[tuple[str, tuple[int, int, int, str]]]:
    """Yield the fields of messages and of those inside them: full name; number, type, label, type's name."""
    for message in found:
        name = f"{within}{message.name}"
        for field in message.field:
            yield f"{name}.{field.name}", _facts(field)
        yield from fields_of(message.nested_type, f"{name}.")


def _facts(field: FieldDescriptorProto) -> tuple[int, int, int, str]:
    return field.number, field.type, field.label, field.type_name
