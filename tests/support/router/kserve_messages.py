"""Requests of the Open Inference Protocol as clients make them, and responses as clients read them."""

from __future__ import annotations

import json
import struct
from typing import Any

from quire.kserve.v2 import kserve_pb2 as pb

_CODES = {"BOOL": "?", "INT32": "i", "UINT32": "I", "FP32": "f"}
_FIELDS = {"BOOL": "bool_contents", "INT32": "int_contents", "BYTES": "bytes_contents"}


def infer(
    model: str = "demo",
    name: str = "",
    outputs: tuple[str, ...] = (),
    parameters: dict[str, Any] | None = None,
    typed: bool = False,
    **inputs: Any,
) -> pb.ModelInferRequest:
    """Return a request with the id `name`. Of inputs, str, bytes and dict (JSON) are BYTES, bool BOOL, a list INT32."""
    request = pb.ModelInferRequest(model_name=model, id=name)
    for each in outputs:
        request.outputs.add(name=each)
    for key, value in (parameters or {}).items():
        _set(request.parameters[key], value)
    for key, value in inputs.items():
        add_input(request, key, value, typed)
    return request


def add_input(request: pb.ModelInferRequest, name: str, value: Any, typed: bool = False) -> None:
    """Add one input, in raw form or as typed contents."""
    if isinstance(value, dict):
        value = json.dumps(value)
    elements = value if isinstance(value, list) else [value.encode() if isinstance(value, str) else value]
    datatype = "BOOL" if isinstance(value, bool) else "INT32" if isinstance(value, list) else "BYTES"
    tensor = request.inputs.add(name=name, datatype=datatype, shape=[len(elements)])
    if typed:
        getattr(tensor.contents, _FIELDS[datatype]).extend(elements)
    elif datatype == "BYTES":
        request.raw_input_contents.append(b"".join(struct.pack("<I", len(each)) + each for each in elements))
    else:
        request.raw_input_contents.append(struct.pack(f"<{len(elements)}{_CODES[datatype]}", *elements))


def outputs_of(response: pb.ModelInferResponse) -> dict[str, list[Any]]:
    """Return the elements of each output of a response in raw form; BYTES as text."""
    assert len(response.raw_output_contents) == len(response.outputs)
    read = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        elements = _texts(raw) if tensor.datatype == "BYTES" else _numbers(raw, _CODES[tensor.datatype])
        assert list(tensor.shape) == [len(elements)]
        read[tensor.name] = elements
    return read


def is_final(response: pb.ModelInferResponse) -> bool:
    return response.parameters["triton_final_response"].bool_param


def _numbers(raw: bytes, code: str) -> list[Any]:
    return [each for (each,) in struct.iter_unpack(f"<{code}", raw)]


def _texts(raw: bytes) -> list[str]:
    texts, at = [], 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        texts.append(raw[at + 4 : at + 4 + length].decode())
        at += 4 + length
    return texts


def _set(parameter: pb.InferParameter, value: Any) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int():
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case _:
            parameter.string_param = value
