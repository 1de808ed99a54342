"""`quire call` against real servers: what it lists and describes, every kind of call, errors in words."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2

from cli.commands import call
from cli.suite.stack import free_ports
from common.errors import FieldViolation, InvalidRequest, Overloaded, QuotaViolation
from tests.support.fake_router import RouterDouble, admitted, served

SERVICE = "quire.inference.v1.InferenceService"


@pytest.fixture
async def double() -> RouterDouble:
    return RouterDouble()


@pytest.fixture
async def address(double: RouterDouble) -> AsyncIterator[str]:
    async with served(double) as running:
        yield running


async def quire_call(*words: str, address: str) -> int:
    """Run the command on a thread; its server lives on this one."""
    return await asyncio.to_thread(call.main, [*words, "--address", address])


async def test_alone_it_lists_the_services(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await quire_call(address=address) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", SERVICE]


async def test_a_service_is_its_methods(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await quire_call(SERVICE, address=address) == 0
    types = "quire.inference.v1.Generate{}"
    wanted = f"rpc Generate({types.format('Request')}) returns (stream {types.format('Response')})"
    assert capsys.readouterr().out.splitlines()[0] == wanted


async def test_describe_writes_a_message_as_a_proto_file_does(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await quire_call("describe", "quire.inference.v1.Finished", address=address) == 0
    assert capsys.readouterr().out.splitlines() == [
        "message quire.inference.v1.Finished {",
        "  uint32 index = 1",
        "  quire.types.v1.FinishReason reason = 2",
        "  quire.types.v1.Usage usage = 3",
        "  quire.inference.v1.Timings timings = 4",
        "  oneof stopped_by {",
        "    string stop_string = 5",
        "    int32 stop_token_id = 6",
        "  }",
        "}",
    ]


async def test_describe_knows_optional_repeated_maps_enums_and_services(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await quire_call("describe", "quire.types.v1.SamplingParams", address=address)
    lines = capsys.readouterr().out.splitlines()
    for line in ("optional float top_p = 2", "repeated string stop = 7", "map<int32, float> logit_bias = 12"):
        assert f"  {line}" in lines
    await quire_call("describe", "quire.types.v1.FinishReason", address=address)
    assert "  FINISH_REASON_STOP = 1" in capsys.readouterr().out.splitlines()
    await quire_call("describe", "grpc.health.v1.Health", address=address)
    assert capsys.readouterr().out.startswith("service grpc.health.v1.Health {\n  rpc Check(")


@pytest.mark.parametrize(
    "method", ["GetStatus", "InferenceService/GetStatus", f"{SERVICE}/GetStatus", f"{SERVICE}.GetStatus"]
)
async def test_a_method_may_be_named_as_short_as_is_clear(
    method: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await quire_call(method, address=address) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["queued_requests"], shown["workers"][0]["worker_id"]) == (2, "worker-0")
    assert "draining" not in shown


async def test_defaults_are_shown_when_asked_for(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await quire_call("GetStatus", "--defaults", address=address) == 0
    assert json.loads(capsys.readouterr().out)["draining"] is False


async def test_a_stream_is_one_document_a_line(
    address: str, double: RouterDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"prompt": {"text": "Grüße"}, "sampling": {"max_tokens": 3, "ignoreEos": True}, "priority": 5}
    assert await quire_call("Generate", json.dumps(request), "--header", "Tenant: a", address=address) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(event) for event in events] == [["admitted"], ["tokens"], ["tokens"], ["finished"]]
    assert "".join(event["tokens"]["text"] for event in events[1:3]) == "Hello"
    assert (double.requests[0].prompt.text, double.requests[0].priority) == ("Grüße", 5)
    assert (double.requests[0].sampling.max_tokens, double.requests[0].sampling.ignore_eos) == (3, True)
    assert double.metadata[0]["tenant"] == "a"


@pytest.mark.parametrize("source", ["-", "@"])
async def test_requests_come_from_standard_input_or_a_file_too(
    source: str, address: str, double: RouterDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{\n "prompt": {"text": "x"}\n}'
    (tmp_path / "request.json").write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    data = source if source == "-" else f"@{tmp_path}/request.json"
    assert await quire_call("Tokenize", data, address=address) == 0
    assert double.requests[0].prompt.text == "x"


async def test_a_method_that_takes_a_stream_gets_a_request_a_line(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"list_services": ""}\n\n{"file_by_filename": "none"}\n'))
    assert await quire_call("ServerReflectionInfo", "-", address=address) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert {"name": SERVICE} in first["list_services_response"]["service"]
    assert second["error_response"]["error_code"] == grpc.StatusCode.NOT_FOUND.value[0]


async def test_an_error_is_its_code_and_every_detail(
    address: str, double: RouterDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    double.scripts = [[InvalidRequest(FieldViolation("sampling.top_p", "is 2"))]]
    assert await quire_call("Generate", address=address) == 1
    assert capsys.readouterr().err.splitlines() == [
        "quire: INVALID_ARGUMENT: sampling.top_p: is 2",
        '  ErrorInfo {"reason": "INVALID_ARGUMENT", "domain": "quire"}',
        '  BadRequest {"field_violations": [{"field": "sampling.top_p", "description": "is 2"}]}',
    ]


async def test_what_came_before_an_error_is_printed(
    address: str, double: RouterDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    double.scripts = [[admitted(), Overloaded(QuotaViolation("router.queue", "full"), 1.5)]]
    assert await quire_call("Generate", address=address) == 1
    shown = capsys.readouterr()
    assert "admitted" in json.loads(shown.out)
    assert '  RetryInfo {"retry_delay": "1.500s"}' in shown.err.splitlines()


async def test_the_timeout_ends_a_call(address: str, double: RouterDouble, capsys: pytest.CaptureFixture[str]) -> None:
    double.scripts = [[admitted(), asyncio.Event()]]
    assert await quire_call("Generate", "--timeout", "0.5", address=address) == 1
    assert capsys.readouterr().err.startswith("quire: DEADLINE_EXCEEDED: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Nothing"], "the server has no method Nothing"),
        (["describe", "no.such.Thing"], "the server knows no no.such.Thing"),
        (["describe", "quire.inference.v1.Output.text"], "neither a message, nor an enum, nor a service"),
        (["GetStatus", '{"zz": 1}'], 'has no field named "zz"'),
        (["GetStatus", "{"], "Failed to load JSON"),
        (["GetStatus", "@/nothing/here"], "request: /nothing/here cannot be read: No such file or directory"),
        (["describe"], "describe: names nothing; expected a type"),
        (["ServerReflectionInfo", '{"zz": 1}'], 'has no field named "zz"'),
        (["GetStatus", "--header", "tenant"], "is 'tenant'; expected 'KEY: VALUE'"),
    ],
)
async def test_what_cannot_be_asked_is_said_and_nothing_is_called(
    words: list[str], said: str, address: str, double: RouterDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await quire_call(*words, address=address) == 2
    assert said in capsys.readouterr().err
    assert not double.requests


async def test_nobody_there_is_said_with_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    assert await quire_call("GetStatus", address=nowhere) == 1
    assert capsys.readouterr().err == f"quire: no server answers at {nowhere}\n"


# ------------------------------------------------------------ servers of others


class OneFileAtATime(reflection.ReflectionServicer):  # type: ignore[misc]
    """Sends the file that was asked for without those that it imports, as servers may."""

    def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        for request in request_iterator:
            for answer in super().ServerReflectionInfo(iter([request]), context):
                if answer.HasField("file_descriptor_response"):
                    del answer.file_descriptor_response.file_descriptor_proto[1:]
                yield answer


@contextmanager
def foreign(*handlers: grpc.GenericRpcHandler) -> Iterator[str]:
    """Run a server of grpc's API for threads."""
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, list(handlers))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def reflecting(
    name: str, services: Sequence[str] = (SERVICE,), pool: DescriptorPool | None = None
) -> grpc.GenericRpcHandler:
    """Return reflection under a name, of services that the server does not even have."""
    servicer = OneFileAtATime(services, pool)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_either_version_of_reflection_will_do(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    with foreign(reflecting(f"grpc.reflection.{version}.ServerReflection")) as address:
        assert await quire_call("describe", "quire.inference.v1.Output", address=address) == 0
        assert "  repeated quire.types.v1.TokenLogprobs logprobs = 4" in capsys.readouterr().out.splitlines()
        assert await quire_call("GetModel", address=address) == 1
        assert capsys.readouterr().err == "quire: UNIMPLEMENTED: Method not found!\n"


async def test_a_server_without_reflection_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    with foreign() as address:
        assert await quire_call(address=address) == 2
    assert "the server has no reflection" in capsys.readouterr().err


def two_services() -> DescriptorPool:
    """Return the types of two services that have a method of one name."""
    file = descriptor_pb2.FileDescriptorProto(name="two.proto", package="two", syntax="proto3")
    file.message_type.add(name="Empty")
    for name in ("First", "Second"):
        method = file.service.add(name=name).method.add(name="Do")
        method.input_type = method.output_type = ".two.Empty"
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


async def test_an_ambiguous_method_names_what_it_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    handler = reflecting("grpc.reflection.v1alpha.ServerReflection", ["two.First", "two.Second"], two_services())
    with foreign(handler) as address:
        assert await quire_call("Do", address=address) == 2
        assert "Do may be any of two.First/Do, two.Second/Do" in capsys.readouterr().err
        assert await quire_call("Second/Do", address=address) == 1
        assert "UNIMPLEMENTED" in capsys.readouterr().err
