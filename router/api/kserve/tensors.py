"""Tensors of the Open Inference Protocol: the model's inputs and outputs, and the codec of their elements."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from common.contracts.errors import FieldViolation
from quire.kserve.v2 import kserve_pb2 as pb

# bool, int, float or bytes, as the datatype has it.
Elements: TypeAlias = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Datatype:
    """One type of element: its name, its field in InferTensorContents, its struct code, its name in a ModelConfig.

    BYTES has no struct code: the length of each element precedes it.
    """

    name: str
    contents: str
    code: str
    config: pb.DataType.ValueType


BOOL: Final = Datatype("BOOL", "bool_contents", "?", pb.TYPE_BOOL)
INT32: Final = Datatype("INT32", "int_contents", "i", pb.TYPE_INT32)
UINT32: Final = Datatype("UINT32", "uint_contents", "I", pb.TYPE_UINT32)
FP32: Final = Datatype("FP32", "fp32_contents", "f", pb.TYPE_FP32)
BYTES: Final = Datatype("BYTES", "bytes_contents", "", pb.TYPE_STRING)

ANY_LENGTH: Final = -1


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of one dimension: `length` elements, or any number of them."""

    name: str
    datatype: Datatype
    length: int


TEXT_OUTPUT: Final = Tensor("text_output", BYTES, ANY_LENGTH)
FINISH_REASON: Final = Tensor("finish_reason", BYTES, ANY_LENGTH)
CUMULATIVE_LOGPROB: Final = Tensor("cumulative_logprob", FP32, ANY_LENGTH)
LOGPROBS: Final = Tensor("logprobs", BYTES, ANY_LENGTH)
NUM_INPUT_TOKENS: Final = Tensor("num_input_tokens", UINT32, 1)
NUM_OUTPUT_TOKENS: Final = Tensor("num_output_tokens", UINT32, ANY_LENGTH)
OUTPUT_IDS: Final = Tensor("output_ids", INT32, ANY_LENGTH)
OUTPUTS: Final = (
    *(TEXT_OUTPUT, FINISH_REASON, CUMULATIVE_LOGPROB, LOGPROBS),
    *(NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS, OUTPUT_IDS),
)
TEXT_INPUT: Final = Tensor("text_input", BYTES, 1)
INPUT_IDS: Final = Tensor("input_ids", INT32, ANY_LENGTH)
INPUTS: Final = (
    TEXT_INPUT,
    INPUT_IDS,
    Tensor("stream", BOOL, 1),
    Tensor("sampling_parameters", BYTES, 1),
    Tensor("exclude_input_in_output", BOOL, 1),
    *(Tensor(f"return_{output.name}", BOOL, 1) for output in OUTPUTS[1:]),
)
_INPUT_OF: Final[Mapping[str, Tensor]] = {tensor.name: tensor for tensor in INPUTS}
_LENGTH: Final = struct.Struct("<I")


def inputs_of(request: pb.ModelInferRequest) -> tuple[dict[str, Elements], list[FieldViolation]]:
    """Return the elements of each input by its name, and the mistakes of those that are left out."""
    found: dict[str, Elements] = {}
    wrong: list[FieldViolation] = []
    if len(request.inputs) > len(INPUTS):
        what = f"has {len(request.inputs)} tensors; expected each of the {len(INPUTS)} that there are at most once"
        return {}, [FieldViolation("inputs", what)]
    raws: list[bytes | None] = [*request.raw_input_contents] or [None] * len(request.inputs)
    if len(raws) != len(request.inputs):
        what = f"has {len(raws)} entries for {len(request.inputs)} inputs; expected one for each, or none at all"
        return {}, [FieldViolation("raw_input_contents", what)]
    for place, (tensor, raw) in enumerate(zip(request.inputs, raws, strict=True)):
        expected = _INPUT_OF.get(tensor.name)
        if expected is None:
            what = f"is {tensor.name!r}; expected one of {', '.join(_INPUT_OF)}"
            wrong.append(FieldViolation(f"inputs[{place}].name", what))
            continue
        problems = _mismatches(expected, tensor, raw)
        if tensor.name in found:
            problems.append("is given twice")
        if not problems:
            try:
                found[tensor.name] = _elements(expected.datatype, tensor, raw)
            except ValueError as error:
                problems.append(str(error))
        wrong += [FieldViolation(tensor.name, problem) for problem in problems]
    return found, wrong


def add_output(response: pb.ModelInferResponse, tensor: Tensor, elements: Elements, raw: bool) -> None:
    """Put a tensor into a response, in raw form or as typed contents."""
    output = response.outputs.add(name=tensor.name, datatype=tensor.datatype.name, shape=[len(elements)])
    if raw:
        response.raw_output_contents.append(_raw(tensor.datatype, elements))
    else:
        getattr(output.contents, tensor.datatype.contents).extend(elements)


def _mismatches(expected: Tensor, tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> list[str]:
    """Return how a tensor differs from the one that the model takes."""
    problems = []
    if tensor.datatype != expected.datatype.name:
        problems.append(f"has datatype {tensor.datatype!r}; expected {expected.datatype.name}")
    shape = list(tensor.shape)
    if len(shape) != 1 or shape[0] < 0 or expected.length not in (ANY_LENGTH, shape[0]):
        problems.append(f"has shape {shape}; expected [{'n' if expected.length == ANY_LENGTH else expected.length}]")
    if "shared_memory_region" in tensor.parameters:
        problems.append("is in shared memory, which is not offered; send its elements")
    if raw is not None and tensor.HasField("contents"):
        problems.append("has contents beside raw_input_contents; expected one of them")
    return problems


def _elements(datatype: Datatype, tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Elements:
    """Return the elements, as many as the shape has. Raises ValueError when their number differs."""
    count = tensor.shape[0]
    if raw is not None:
        return _byte_strings(raw, count) if datatype is BYTES else _numbers(datatype, raw, count)
    elements: Elements = getattr(tensor.contents, datatype.contents)
    if len(elements) != count:
        raise ValueError(
            f"has {len(elements)} elements in contents.{datatype.contents}; expected {count}, as its shape"
        )
    return elements


def _numbers(datatype: Datatype, raw: bytes, count: int) -> Elements:
    size = count * struct.calcsize(f"<{datatype.code}")
    if len(raw) != size:
        raise ValueError(f"has {len(raw)} bytes; expected {size} for {count} of {datatype.name}")
    return struct.unpack(f"<{count}{datatype.code}", raw)


def _byte_strings(raw: bytes, count: int) -> Elements:
    elements: list[bytes] = []
    at = 0
    while at + _LENGTH.size <= len(raw) and len(elements) < count:
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        elements.append(raw[at : at + length])
        at += length
    if at != len(raw) or len(elements) != count:
        raise ValueError(f"has {len(raw)} bytes; expected {count} of BYTES, each after its length as a uint32")
    return elements


def _raw(datatype: Datatype, elements: Elements) -> bytes:
    if datatype is BYTES:
        return b"".join(_LENGTH.pack(len(each)) + each for each in elements)
    return struct.pack(f"<{len(elements)}{datatype.code}", *elements)
