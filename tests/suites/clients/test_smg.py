"""SMG's gateway as released in front of two suites; and the protocols of gateways against their publishers."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from common.process.ports import free_ports
from quire.vllm.v1 import control_pb2, engine_common_pb2, engine_pb2, inference_pb2
from tests.suites.clients.other_python import ENVIRONMENTS, answers_of, need_clients, program
from tests.suites.clients.served import Served, missing, served_suite
from tests.suites.clients.test_open_inference import fields_of, methods, values
from tests.support.suite import PATIENCE, greedy

SMG = "smg"
QUESTION: Any = [{"role": "user", "content": "Tell me a story about Anna."}]
# The messages of SMG's protocol of which Quire reads and writes no field.
UNREAD = {
    *("MultimodalInputs", "MediaRefs", "KvTransferParams", "MediaIdentity"),
    *("SubscribeKvEventsRequest", "KvEventBatch", "FlushCacheRequest", "FlushCacheResponse"),
    *("StartProfileRequest", "ProfileResponse"),
}


@pytest.fixture(scope="session", autouse=True)
def smg() -> None:
    """Check for the gateway before suites are started for it."""
    need_clients(SMG)


@dataclass(frozen=True)
class Fleet:
    """The gateway's URL, and the suites behind it."""

    url: str
    suites: tuple[Served, Served]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            model=self.suites[0].model, messages=QUESTION, temperature=0, **{"max_tokens": 20} | fields
        )

    def workers(self) -> list[dict[str, Any]]:
        return list(httpx.get(f"{self.url}/workers", timeout=PATIENCE).json()["workers"])


@pytest.fixture(scope="module")
def fleet(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The gateway over the suite of all clients, and over one of two workers that a test may kill."""
    with (
        served_suite(tmp_path_factory.mktemp("second"), workers=2) as second,
        gateway([served, second], tmp_path_factory.mktemp("gateway") / "log") as url,
    ):
        yield Fleet(url, (served, second))


@contextmanager
def gateway(suites: list[Served], log: Path) -> Iterator[str]:
    """Run the gateway until the context ends; yield its URL once it has every suite."""
    port, metrics = free_ports(2)
    flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
    flags += ["--prometheus-port", str(metrics), "--policy", "round_robin", "--health-check-interval-secs", "1"]
    urls = [f"grpc://{each.address}" for each in suites]
    command = [str(program(SMG, "smg")), "launch", *flags, "--worker-urls", *urls]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: ready_workers(url) == len(suites), lambda: log.read_text()[-4000:], process)
            yield url
        finally:
            process.kill()


def ready_workers(url: str) -> int:
    try:
        found = httpx.get(f"{url}/workers", timeout=PATIENCE).json()
        models = httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()
    except httpx.TransportError:
        return 0
    return sum(each["is_healthy"] for each in found["workers"]) if models.get("data") else 0


def until(reached: Callable[[], bool], words: Callable[[], str], process: subprocess.Popen[bytes]) -> None:
    """Wait until a state is reached; fail with the words if the process ends, or if that takes too long."""
    end = time.monotonic() + PATIENCE
    while not reached():
        assert process.poll() is None, words()
        assert time.monotonic() < end, words()
        time.sleep(0.1)


# ------------------------------------------------------------ behind the gateway


def test_the_gateway_knows_the_suites_as_engines_of_vllm(fleet: Fleet) -> None:
    found = fleet.workers()
    assert {each["url"] for each in found} == {f"grpc://{each.address}" for each in fleet.suites}
    for each in found:
        assert (each["runtime_type"], each["connection_mode"]) == ("vllm", "grpc")
        labels = each["labels"]
        assert (labels["max_context_length"], labels["page_size"], labels["vocab_size"]) == ("4096", "16", "2027")


def test_tokens_are_those_of_quires_own_api(fleet: Fleet) -> None:
    prompt = [5, 6, 7]
    expected = fleet.suites[0].run(lambda suite: suite.generate(greedy(prompt, 12)))
    model = fleet.suites[0].model
    body = {
        "model": model,
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
    }
    for _ in fleet.suites:
        found = httpx.post(f"{fleet.url}/generate", json=body, timeout=PATIENCE)
        assert found.status_code == 200, found.text
        answer = found.json()
        assert (answer[0] if isinstance(answer, list) else answer)["output_ids"] == expected.tokens


def test_a_chat_is_that_of_quires_own_api_whole_and_streamed(fleet: Fleet) -> None:
    served = fleet.suites[0]
    direct = openai.OpenAI(base_url=f"{served.http_url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    expected = direct.chat.completions.create(model=served.model, messages=QUESTION, temperature=0, max_tokens=20)
    for _ in fleet.suites:
        found = fleet.chat()
        assert found.choices[0].message.content == expected.choices[0].message.content
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (11, 20)
        chunks = [*fleet.chat(stream=True, stream_options={"include_usage": True})]
        text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
        assert text == expected.choices[0].message.content
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (11, 20)
        assert len(chunks) > 5


def test_several_sequences_stops_and_schemas(fleet: Fleet) -> None:
    """Demo model: response_format has the schema."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    found = fleet.chat(n=2, max_tokens=60, response_format=form)
    assert [each.finish_reason for each in found.choices] == ["stop", "stop"]
    assert all('"a"' in (each.message.content or "") for each in found.choices)
    stopped = fleet.chat(stop=["attic"])
    assert stopped.choices[0].finish_reason == "stop"
    assert "attic" not in (stopped.choices[0].message.content or "")


def test_a_named_tool_is_called(fleet: Fleet) -> None:
    """Demo model: tool_choice names the tool."""
    schema = {"type": "object", "properties": {"town": {"enum": ["Lyon", "Basel"]}}, "required": ["town"]}
    tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
    found = fleet.chat(tools=[tool], tool_choice={"type": "function", "function": {"name": "find"}}, max_tokens=60)
    (call,) = found.choices[0].message.tool_calls
    assert call.function.name == "find"
    assert json.loads(call.function.arguments)["town"] in ("Lyon", "Basel")


def test_the_second_question_about_a_text_finds_it_cached(fleet: Fleet) -> None:
    words: Any = [{"role": "user", "content": "Anna walked to the attic. " * 30}]
    client, model = fleet.client, fleet.suites[0].model
    answers = [
        client.chat.completions.create(model=model, messages=words, temperature=0, max_tokens=4) for _ in range(4)
    ]
    details = [each.usage.prompt_tokens_details for each in answers if each.usage is not None]
    # The suites take turns, so the first two questions are new to theirs.
    assert [(each.cached_tokens or 0) > 0 for each in details if each is not None] == [False, False, True, True]


def test_what_is_wrong_is_told_in_quires_words(fleet: Fleet) -> None:
    with pytest.raises(openai.BadRequestError, match="lower max_tokens to 4085 or shorten the prompt"):
        fleet.chat(max_tokens=60_000)


def test_a_client_that_leaves_ends_its_request(fleet: Fleet) -> None:
    with fleet.chat(stream=True, max_tokens=3000, extra_body={"ignore_eos": True}) as chunks:
        next(iter(chunks))
    fleet.suites[0].run(lambda suite: suite.until_all_free(1))
    fleet.suites[1].run(lambda suite: suite.until_all_free(2))


def test_while_a_suite_is_dead_the_other_one_answers(fleet: Fleet) -> None:
    """Demo model: every process of one suite is killed. The last test, as the suite does not come back."""
    expected = fleet.chat().choices[0].message.content
    with fleet.chat(stream=True, max_tokens=400) as running:
        first = next(iter(running))
        assert first.choices
        fleet.suites[1].loop.call_soon_threadsafe(fleet.suites[1].suite.stack.kill)
        for _ in range(4):
            assert fleet.chat().choices[0].message.content == expected
        chunks = [*fleet.chat(stream=True)]
        assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == expected


# ------------------------------------------------------------ the wire


def declared(*modules: Any) -> list[FileDescriptorProto]:
    """Return what Quire declares, with the names of types alone, as files lie elsewhere."""
    found = []
    for each in modules:
        file = FileDescriptorProto()
        each.DESCRIPTOR.CopyToProto(file)
        found.append(file)
    return found


def wire() -> tuple[list[FileDescriptorProto], list[FileDescriptorProto]]:
    """Return what SMG's gateway declares, and vLLM."""
    folder = ENVIRONMENTS / "vllm"
    if not (folder / ".installed").exists():
        missing(".clients/vllm", "make test-clients")
    found = answers_of("smg_calls.py", {"protos": str(folder)}, SMG)
    gateway = [FileDescriptorProto.FromString(base64.b64decode(each)) for each in found["gateway"]]
    return gateway, [*FileDescriptorSet.FromString(base64.b64decode(found["vllm"])).file]


def facts(files: list[FileDescriptorProto]) -> tuple[dict[str, Any], dict[str, Any], set[Any]]:
    """Return the fields of all messages, also with their oneof, the values of enums, and the methods."""
    fields = {f"{file.package}.{name}": each for file in files for name, each in fields_of(file.message_type)}
    chosen = {f"{file.package}.{name}": each for file in files for name, each in oneofs(file.message_type)}
    numbers = {(file.package, *each) for file in files for each in values(file)}
    inner = {(file.package, *each) for file in files for each in nested_values(file.message_type)}
    return fields, chosen, {*numbers, *inner, *((file.package, *each) for file in files for each in methods(file))}


def oneofs(found: Any, within: str = "") -> Iterator[tuple[str, tuple[str, bool]]]:
    """Yield the oneof of each field, and whether the field is optional."""
    message: DescriptorProto
    for message in found:
        name = f"{within}{message.name}"
        for field in message.field:
            named = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
            yield f"{name}.{field.name}", (named, field.proto3_optional)
        yield from oneofs(message.nested_type, f"{name}.")


def nested_values(found: Any, within: str = "") -> Iterator[tuple[str, str, int]]:
    message: DescriptorProto
    for message in found:
        name = f"{within}{message.name}"
        yield from (
            (f"{name}.{each.name}", value.name, value.number) for each in message.enum_type for value in each.value
        )
        yield from nested_values(message.nested_type, f"{name}.")


def test_the_wire_is_that_of_vllm() -> None:
    """No model: every field, method and enum value of the one is in the other: name, number, type and label."""
    _, theirs = wire()
    ours = declared(inference_pb2, control_pb2)
    assert {each.package for each in theirs} == {"vllm"}
    assert facts(ours) == facts(theirs)
    fields, _, others = facts(ours)
    assert (len(fields), len(others)) == (177, 35)


def test_the_wire_is_that_of_smg() -> None:
    """No model: all methods; and all fields of messages that Quire reads or writes."""
    theirs, _ = wire()
    ours = declared(engine_common_pb2, engine_pb2)
    fields, chosen, others = facts(ours)
    their_fields, their_chosen, their_others = facts(theirs)
    read = {each.name for file in ours for each in file.message_type} - UNREAD

    def concerned(name: str) -> bool:
        inner = name.removeprefix("vllm.grpc.engine.").removeprefix("smg.grpc.common.")
        return inner.partition(".")[0] in read

    assert fields == {name: each for name, each in their_fields.items() if concerned(name)}
    assert chosen == {name: each for name, each in their_chosen.items() if concerned(name)}
    services = {each for each in their_others if len(each) == 7}
    assert {each for each in others if len(each) == 7} == services
    assert len(services) == 12
