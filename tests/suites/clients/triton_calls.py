"""Calls of `tritonclient`: run by .clients/light/bin/python, which reads the names of the calls as JSON on stdin.

The script prints one JSON object, with an entry for each named method; test_tritonclient.py checks the entries.
"""

from __future__ import annotations

import asyncio
import base64
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

PATIENCE_S = 120.0
GREEDY: dict[str, Any] = {"temperature": "0", "ignore_eos": True}
EXTRAS = ("finish_reason", "num_input_tokens", "num_output_tokens", "output_ids")


class Calls:
    """All calls, with the client, the model's name and the prompts."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.address, self.model, self.prompts = given["address"], given["model"], given["prompts"]
        self.client = triton.InferenceServerClient(self.address)

    def server(self) -> dict[str, Any]:
        metadata = self.client.get_model_metadata(self.model)
        config = self.client.get_model_config(self.model).config
        return {
            "live": self.client.is_server_live(),
            "ready": self.client.is_server_ready(),
            "model ready": self.client.is_model_ready(self.model),
            "other ready": self.client.is_model_ready("other"),
            "name": self.client.get_server_metadata().name,
            "inputs": {each.name: [each.datatype, *each.shape] for each in metadata.inputs},
            "outputs": {each.name: [each.datatype, *each.shape] for each in metadata.outputs},
            "decoupled": config.model_transaction_policy.decoupled,
        }

    def unary(self) -> list[dict[str, Any]]:
        """Return each prompt's answer: asked as text, as token ids by name, and with the prompt before the answer."""
        prompt = self.prompts[0]
        as_text = inputs(prompt["text"], exclude=True, **GREEDY, max_tokens=8)
        flagged = [*as_text, *(flag(f"return_{name}") for name in EXTRAS)]
        by_ids = [tensor("input_ids", np.array(prompt["ids"], np.int32), "INT32"), sampling(**GREEDY, max_tokens=8)]
        named = [triton.InferRequestedOutput(name) for name in ("text_output", *EXTRAS)]
        with_prompt = inputs(prompt["text"], **GREEDY, max_tokens=8)
        return [
            read(self.client.infer(self.model, flagged, request_id="7")),
            read(self.client.infer(self.model, by_ids, outputs=named, request_id="7")),
            read(self.client.infer(self.model, with_prompt, request_id="7")),
        ]

    def parameters(self) -> dict[str, Any]:
        """Return an answer whose sampling, priority and time limit came as parameters of the request."""
        return read(
            self.client.infer(
                self.model,
                [*inputs(self.prompts[0]["text"], exclude=True), flag("return_output_ids")],
                parameters={"temperature": 0.0, "max_tokens": 8, "ignore_eos": True},
                priority=1,
                timeout=20_000_000,
            )
        )

    def callback(self) -> dict[str, Any]:
        """Return an answer that came to a callback."""
        done: queue.Queue[Any] = queue.Queue()
        wanted = inputs(self.prompts[0]["text"], exclude=True, **GREEDY, max_tokens=8)
        self.client.async_infer(self.model, wanted, lambda result, error: done.put((result, error)))
        result, error = done.get(timeout=PATIENCE_S)
        return read(result) if error is None else {"error": str(error)}

    def stream(self) -> list[dict[str, Any]]:
        """Return every response of one stream with a request for each prompt, in the order in which they came."""
        came: queue.Queue[dict[str, Any]] = queue.Queue()
        self.client.start_stream(
            lambda result, error: came.put(read(result) if error is None else {"error": str(error)})
        )
        for number, prompt in enumerate(self.prompts):
            wanted = [*inputs(prompt["text"], stream=True, **GREEDY, max_tokens=24), *map(flag, ("return_output_ids",))]
            self.client.async_stream_infer(self.model, wanted, request_id=str(number))
        self.client.stop_stream()
        return list(came.queue)

    def whole_on_a_stream(self) -> list[dict[str, Any]]:
        """Return the responses to a request that does not stream, and to one that is content with an empty last one."""
        came: queue.Queue[dict[str, Any]] = queue.Queue()
        self.client.start_stream(
            lambda result, error: came.put(read(result) if error is None else {"error": str(error)})
        )
        text = self.prompts[0]["text"]
        self.client.async_stream_infer(
            self.model, inputs(text, exclude=True, **GREEDY, max_tokens=3), request_id="whole"
        )
        streamed = inputs(text, stream=True, **GREEDY, max_tokens=3)
        self.client.async_stream_infer(self.model, streamed, request_id="empty", enable_empty_final_response=True)
        self.client.stop_stream()
        return list(came.queue)

    def asyncio(self) -> dict[str, str]:
        """Return texts by id, as a client of Triton's vLLM backend gathers them from the asyncio client."""

        async def gather() -> dict[str, str]:
            texts: dict[str, str] = {}

            async def requests() -> Any:
                for number, prompt in enumerate(self.prompts):
                    given = GREEDY | {"max_tokens": "24"}
                    yield {
                        "model_name": self.model,
                        "inputs": inputs(prompt["text"], stream=True, **given),
                        "outputs": [triton.InferRequestedOutput("text_output")],
                        "request_id": str(number),
                        "parameters": given,
                    }

            async with triton_aio.InferenceServerClient(self.address) as client:
                async for result, error in client.stream_infer(requests(), stream_timeout=PATIENCE_S):
                    if error is not None:
                        raise error
                    name = result.get_response().id
                    texts[name] = texts.get(name, "") + result.as_numpy("text_output")[0].decode()
            return texts

        return asyncio.run(gather())

    def several(self) -> list[dict[str, Any]]:
        """Return one answer of three sequences, twice with one seed."""
        wanted = inputs(self.prompts[0]["text"], exclude=True, n=3, seed=5, ignore_eos=True, max_tokens=6)
        extras = [flag("return_cumulative_logprob"), flag("return_logprobs"), flag("return_num_output_tokens")]
        return [read(self.client.infer(self.model, [*wanted, *extras])) for _ in range(2)]

    def constrained(self) -> list[str]:
        """Return answers held to a JSON schema and to a regular expression."""
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        closed = schema | {"additionalProperties": False}
        given: list[dict[str, Any]] = [{"json_schema": closed}, {"regex": "[0-9]{3}-[a-f]{2}"}]
        texts = []
        for constraint in given:
            wanted = inputs(self.prompts[0]["text"], exclude=True, temperature=1, seed=3, max_tokens=64, **constraint)
            texts.append(read(self.client.infer(self.model, wanted))["text_output"][0])
        return texts

    def errors(self) -> dict[str, list[str]]:
        """Return status and message of each invalid request."""
        ids = tensor("input_ids", np.array([1, 2], np.int64), "INT64")
        long = inputs(self.prompts[0]["text"], **GREEDY, max_tokens=2000)
        return {
            "model": self._error(lambda: self.client.infer("other", inputs("x"))),
            "metadata": self._error(lambda: self.client.get_model_metadata("other")),
            "tensors": self._error(lambda: self.client.infer(self.model, [ids, flag("prompt"), sampling(top_p=3)])),
            "late": self._error(lambda: self.client.infer(self.model, long, client_timeout=0.1)),
            "statistics": self._error(self.client.get_inference_statistics),
        }

    def errors_on_a_stream(self) -> list[dict[str, Any]]:
        """Return the responses of a stream to an invalid request and to a valid one after it."""
        came: queue.Queue[dict[str, Any]] = queue.Queue()
        self.client.start_stream(
            lambda result, error: came.put(read(result) if error is None else {"error": str(error)})
        )
        text = self.prompts[0]["text"]
        self.client.async_stream_infer(self.model, inputs(text, top_p=3, n=0), request_id="wrong")
        first = came.get(timeout=PATIENCE_S)
        self.client.async_stream_infer(self.model, inputs(text, **GREEDY, max_tokens=2), request_id="good")
        self.client.stop_stream()
        return [first, *came.queue]

    def cancelled(self) -> list[str]:
        """Return the errors of a stream that is cancelled while four long answers are under way."""
        came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: came.put((result, error)))
        begun: set[str] = set()
        for number in range(4):
            wanted = inputs(self.prompts[number]["text"], stream=True, **GREEDY, max_tokens=3000)
            self.client.async_stream_infer(self.model, wanted, request_id=str(number))
        while len(begun) < 4:
            result, error = came.get(timeout=PATIENCE_S)
            if error is not None:
                return [str(error)]
            begun.add(result.get_response().id)
        self.client.stop_stream(cancel_requests=True)
        return [str(error) for _, error in came.queue if error is not None]

    def _error(self, call: Any) -> list[str]:
        try:
            call()
        except InferenceServerException as error:
            return [str(error.status()), str(error.message())]
        return ["no error"]


def tensor(name: str, values: Any, datatype: str) -> Any:
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values)
    return made


def flag(name: str, value: bool = True) -> Any:
    return tensor(name, np.array([value]), "BOOL")


def text_of(name: str, text: str) -> Any:
    return tensor(name, np.array([text.encode()], np.object_), "BYTES")


def sampling(**given: Any) -> Any:
    return text_of("sampling_parameters", json.dumps(given))


def inputs(text: str, stream: bool = False, exclude: bool = False, **given: Any) -> list[Any]:
    """Return the inputs of a request for a text; `given` are its sampling parameters."""
    made = [text_of("text_input", text)]
    if stream:
        made.append(flag("stream"))
    if exclude:
        made.append(flag("exclude_input_in_output"))
    return [*made, sampling(**given)] if given else made


def read(result: Any) -> dict[str, Any]:
    """Return a response as JSON has it: its outputs, its id, and whether it is the last of its request."""
    response = result.get_response()
    found: dict[str, Any] = {"id": response.id, "final": response.parameters["triton_final_response"].bool_param}
    for output in response.outputs:
        values = result.as_numpy(output.name)
        found[output.name] = [each.decode() if isinstance(each, bytes) else each.item() for each in values]
    return found


def wire() -> list[str]:
    """Return the protocol as this client has it, as serialised FileDescriptorProtos."""
    return [base64.b64encode(each.DESCRIPTOR.serialized_pb).decode() for each in (model_config_pb2, service_pb2)]


def main() -> None:
    """Make the requested calls, and print their results."""
    given = json.load(sys.stdin)
    if given.get("wire"):
        json.dump({"wire": wire()}, sys.stdout)
    else:
        calls = Calls(given)
        json.dump({name: getattr(calls, name)() for name in given["calls"]}, sys.stdout)


if __name__ == "__main__":
    main()
