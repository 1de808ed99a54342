"""`tritonclient`, NVIDIA's client of the Open Inference Protocol, against a whole suite on the demo model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.demo_model.prompts import questions
from cli.suite.programs import metrics_addresses
from quire.inference.v1 import inference_pb2 as pb
from tests.suites.clients.other_python import ENVIRONMENTS, LIGHT, answers_of, need_clients, output_of
from tests.suites.clients.served import Served
from tests.support.suite import Outcome, greedy

Call = Callable[[str], Any]
BOTH = """
import json, sys
import google.protobuf
import numpy
import tritonclient.grpc as triton
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from quire.client import Client

address, model, prompt = json.load(sys.stdin)
OTLPSpanExporter(endpoint=address, insecure=True).shutdown()
sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
with Client(address) as client:
    own = client.generate(prompt, **sampling)
tensor = triton.InferInput("input_ids", [len(prompt)], "INT32")
tensor.set_data_from_numpy(numpy.array(prompt, numpy.int32))
wanted = [triton.InferRequestedOutput("output_ids")]
with triton.InferenceServerClient(address) as client:
    theirs = client.infer(model, [tensor], outputs=wanted, parameters=sampling).as_numpy("output_ids")
print(json.dumps([google.protobuf.__version__.split(".")[0], list(own.token_ids), theirs.tolist()]))
"""


@pytest.fixture(scope="session", autouse=True)
def tritonclient() -> None:
    """Check for the client before a suite is started for it."""
    need_clients()


@pytest.fixture(scope="module")
def prompts(served: Served) -> list[dict[str, Any]]:
    """Eight prompts, as text and as token ids."""

    async def ids_of(text: str) -> list[int]:
        request = pb.TokenizeRequest(prompt=pb.Prompt(text=text))
        return list((await served.suite.inference.Tokenize(request)).token_ids)

    texts = [question.text for question in questions(8)]
    return [{"text": text, "ids": served.run(lambda _, text=text: ids_of(text))} for text in texts]  # type: ignore[misc]


@pytest.fixture(scope="module")
def call(served: Served, prompts: list[dict[str, Any]]) -> Call:
    """Return what one method of the script's `Calls` returns, made in a process with tritonclient."""

    def made(name: str) -> Any:
        given = {"address": served.address, "model": served.model, "prompts": prompts, "calls": [name]}
        return answers_of("triton_calls.py", given)[name]

    return made


def quires_own(served: Served, ids: list[int], max_tokens: int) -> Outcome:
    """Return the answer of Quire's own API."""
    return served.run(lambda suite: suite.generate(greedy(ids, max_tokens)))


def test_the_server_and_its_model(call: Call) -> None:
    found = call("server")
    assert [found[name] for name in ("live", "ready", "model ready", "other ready")] == [True, True, True, False]
    assert (found["name"], found["decoupled"]) == ("quire", True)
    assert found["inputs"]["text_input"] == ["BYTES", 1]
    assert found["inputs"]["input_ids"] == ["INT32", -1]
    assert found["outputs"]["text_output"] == ["BYTES", -1]


def test_an_answer_is_that_of_quires_own_api(call: Call, served: Served, prompts: list[dict[str, Any]]) -> None:
    own = quires_own(served, prompts[0]["ids"], 8)
    by_text, by_ids, with_prompt = call("unary")
    assert (
        by_text
        == by_ids
        == {
            "id": "7",
            "final": True,
            "text_output": [own.text],
            "finish_reason": ["length"],
            "num_input_tokens": [len(prompts[0]["ids"])],
            "num_output_tokens": [8],
            "output_ids": own.tokens,
        }
    )
    assert with_prompt == {"id": "7", "final": True, "text_output": [prompts[0]["text"] + own.text]}


def test_parameters_of_the_request_and_a_callback(call: Call, served: Served, prompts: list[dict[str, Any]]) -> None:
    own = quires_own(served, prompts[0]["ids"], 8)
    assert call("parameters") == {"id": "", "final": True, "text_output": [own.text], "output_ids": own.tokens}
    assert call("callback") == {"id": "", "final": True, "text_output": [own.text]}


def test_each_request_of_one_stream_is_answered_whole(
    call: Call, served: Served, prompts: list[dict[str, Any]]
) -> None:
    responses = call("stream")
    for number, prompt in enumerate(prompts):
        own = quires_own(served, prompt["ids"], 24)
        mine = [each for each in responses if each["id"] == str(number)]
        assert "".join(each["text_output"][0] for each in mine) == own.text
        assert [token for each in mine for token in each["output_ids"]] == own.tokens
        assert [each["final"] for each in mine] == [False] * (len(mine) - 1) + [True]


def test_an_answer_as_a_whole_on_a_stream_and_an_empty_final_response(call: Call) -> None:
    responses = call("whole_on_a_stream")
    (whole,) = [each for each in responses if each["id"] == "whole"]
    *parts, last = [each for each in responses if each["id"] == "empty"]
    assert whole["final"]
    assert last == {"id": "empty", "final": True}
    assert "".join(each["text_output"][0] for each in parts) == whole["text_output"][0]


def test_the_asyncio_client_as_users_of_tritons_vllm_backend_have_it(
    call: Call, served: Served, prompts: list[dict[str, Any]]
) -> None:
    wanted = {str(number): quires_own(served, prompt["ids"], 24).text for number, prompt in enumerate(prompts)}
    assert call("asyncio") == wanted


def test_several_sequences_with_their_probabilities(call: Call) -> None:
    first, again = call("several")
    assert (first["text_output"], first["num_output_tokens"]) == (again["text_output"], [6, 6, 6])
    assert len(set(first["text_output"])) == 3
    for tokens, cumulative, logprobs in zip(
        first["num_output_tokens"], first["cumulative_logprob"], first["logprobs"], strict=True
    ):
        drawn = [next(iter(entry.values()))["logprob"] for entry in json.loads(logprobs)]
        assert len(drawn) == tokens
        assert sum(drawn) == pytest.approx(cumulative, rel=1e-5)


def test_constraints_hold(call: Call) -> None:
    document, text = call("constrained")
    assert isinstance(json.loads(document)["ok"], bool)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text)


def test_errors_have_their_status_and_name_everything(call: Call, served: Served) -> None:
    found = call("errors")
    unknown = ["StatusCode.NOT_FOUND", f"model 'other' is not served here; {served.model!r}, version '1', is"]
    assert found["model"] == found["metadata"] == unknown
    status, message = found["tensors"]
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert message.startswith("input_ids: has datatype 'INT64'; expected INT32; inputs[1].name: is 'prompt'; expected")
    assert message.endswith("sampling_parameters.top_p: is 3; expected more than 0, at most 1 (1 keeps all tokens)")
    assert found["late"][0] == "StatusCode.DEADLINE_EXCEEDED"
    assert found["statistics"][0] == "StatusCode.UNIMPLEMENTED"
    served.until_all_free()


def test_an_error_on_a_stream_names_its_request_and_the_stream_goes_on(call: Call) -> None:
    wrong, good = call("errors_on_a_stream")
    assert "request wrong: sampling_parameters.top_p: is 3; expected" in wrong["error"]
    assert "sampling_parameters.n: is 0; expected" in wrong["error"]
    assert (good["id"], good["final"]) == ("good", True)


def test_a_cancelled_stream_gives_every_block_back(call: Call, served: Served) -> None:
    before = cancelled_requests(served)
    (error,) = call("cancelled")
    assert "CANCELLED" in error
    served.until_all_free()
    # None of the four came to its end: that would have freed its blocks as well.
    assert cancelled_requests(served) == before + 4


def cancelled_requests(served: Served) -> float:
    """Return the router's count of requests whose clients went away."""
    (address,) = metrics_addresses(served.suite.stack.options)
    metrics = httpx.get(f"http://{address}/metrics", timeout=120.0).text
    (count,) = re.findall(r'^quire:request_failure_total\{.*reason="CANCELLED".*\} (.*)$', metrics, re.MULTILINE)
    return float(count)


def test_quires_own_client_works_in_the_same_environment(
    tmp_path: Path, client_wheel: Path, served: Served, prompts: list[dict[str, Any]]
) -> None:
    """So does OpenTelemetry's exporter of spans: no requirements contradict, and one process calls by both clients."""
    python = client_beside_light(tmp_path, client_wheel)
    output_of([sys.executable, "-m", "pip", "--python", python, "check"])
    said = output_of([python, "-I", "-c", BOTH], json.dumps([served.address, served.model, prompts[0]["ids"]]))
    tokens = quires_own(served, prompts[0]["ids"], 8).tokens
    assert json.loads(said) == ["6", tokens, tokens]


def client_beside_light(folder: Path, wheel: Path) -> str:
    """Return the Python of an environment that has Quire's client and sees all packages of the light environment."""
    output_of([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = str(folder / "bin" / "python")
    (own,) = folder.glob("lib/python3.*/site-packages")
    (light,) = (ENVIRONMENTS / LIGHT).glob("lib/python3.*/site-packages")
    (own / "light.pth").write_text(f"{light}\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    output_of([*pip, "--no-deps", "--no-index", str(wheel)])
    return python
