"""Reads a ModelInferRequest: Quire's own request, and the form of the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from common.contracts.errors import FieldViolation, InvalidRequest
from common.settings.config import mistake
from common.untrusted import json_shape
from quire.inference.v1 import inference_pb2
from quire.kserve.v2 import kserve_pb2 as pb
from router.api.kserve.tensors import (
    CUMULATIVE_LOGPROB,
    INPUT_IDS,
    LOGPROBS,
    OUTPUTS,
    TEXT_INPUT,
    TEXT_OUTPUT,
    Tensor,
    inputs_of,
)
from router.api.shared.field_names import CacheRetention, Float32, Int32, Int64
from router.contracts.events import ValidatedRequest
from router.contracts.ports import CallContext, RequestValidator

CONSTRAINTS: Final = ("json_schema", "regex", "grammar")
# Fields whose name is the same in SamplingParams of quire.types.v1.
_SAME: Final = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "n", "ignore_eos", "logprobs"),
)

# More names than this are refused as a whole.
_MOST_NAMES: Final = 100


# Sampling parameters as clients of Triton's vLLM backend send them: in a JSON tensor, or as parameters of the
# request.
# The names are vLLM's. Such clients send numbers as text too, and pydantic converts them.
class SamplingFields(BaseModel):
    """The parameters. Their ranges are checked in `requests/validate.py`, for every API."""

    model_config = ConfigDict(extra="forbid")

    temperature: Float32 | None = None
    top_p: Float32 | None = None
    top_k: Int32 | None = None
    min_p: Float32 | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    repetition_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    seed: Int64 | None = None
    n: Int32 | None = None
    ignore_eos: bool | None = None
    logprobs: Int32 | None = None
    include_stop_str_in_output: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int32] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[Int32, Float32] | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    grammar: str | None = None
    cache_salt: str = ""
    no_cache: bool = False
    shared_domain: str = ""
    cache_retention: CacheRetention | None = None

    def write(self, request: inference_pb2.GenerateRequest) -> None:
        """Set the given fields in Quire's own request; the rest stays unset."""
        sampling = request.sampling
        for name in _SAME:
            if (value := getattr(self, name)) is not None:
                setattr(sampling, name, value)
        if self.include_stop_str_in_output is not None:
            sampling.include_stop = self.include_stop_str_in_output
        sampling.stop.extend([self.stop] if isinstance(self.stop, str) else self.stop or [])
        sampling.stop_token_ids.extend(self.stop_token_ids or [])
        sampling.bad_words.extend(self.bad_words or [])
        sampling.logit_bias.update(self.logit_bias or {})
        for name in CONSTRAINTS:
            if (value := getattr(self, name)) is not None:
                setattr(request, name, value if isinstance(value, str) else json.dumps(value))
        request.cache.salt, request.cache.no_cache = self.cache_salt, self.no_cache
        request.cache.shared_domain = self.shared_domain
        if self.cache_retention is not None:
            request.cache_retention.CopyFrom(self.cache_retention.message())


@dataclass(frozen=True, slots=True)
class Sampling:
    """The fields that were given, and the path of each in the client's request, such as `parameters.n`."""

    fields: SamplingFields
    paths: Mapping[str, str]

    def path(self, name: str) -> str:
        """Return the path of a field in the client's request, given or not."""
        return self.paths.get(name, _in_json(name))


def sampling_of(parameters: Mapping[str, Any], text: bytes | None) -> tuple[Sampling, list[FieldViolation]]:
    """Return the valid values of the parameters and, over them, of a JSON text; and the mistakes in the others."""
    wrong: list[FieldViolation] = []
    values = _parsed(text, wrong) if text is not None else {}
    merged = {**parameters, **values}
    paths = {name: f"parameters.{name}" for name in parameters} | {name: _in_json(name) for name in values}
    if len(merged) > _MOST_NAMES:
        wrong.append(FieldViolation("parameters", f"are {len(merged)}; expected at most {_MOST_NAMES}"))
        merged = {}
    problems: dict[str, tuple[str, str]] = {}
    try:
        fields = SamplingFields.model_validate(merged)
    except ValidationError as error:
        for each in error.errors():
            # A union reports each of its members: the first is enough.
            name, *inner = each["loc"]
            problems.setdefault(str(name), (_inside(inner) if name == "cache_retention" else "", _words(each)))
        fields = SamplingFields.model_validate({name: merged[name] for name in merged.keys() - problems})
    wrong += [FieldViolation(paths[name] + inner, what) for name, (inner, what) in problems.items()]
    first, *others = [name for name in CONSTRAINTS if getattr(fields, name) is not None] or [""]
    wrong += [FieldViolation(paths[name], f"cannot be combined with {first}; expected one of them") for name in others]
    return Sampling(fields, paths), wrong


def _inside(path: Iterable[int | str]) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path)


def _in_json(name: str) -> str:
    return f"sampling_parameters.{name}"


def _parsed(text: bytes, wrong: list[FieldViolation]) -> dict[str, Any]:
    if excess := json_shape.BODY.excess(text):
        wrong.append(FieldViolation("sampling_parameters", excess))
        return {}
    try:
        values = json.loads(text)
        # JSON may escape half a character, which no other text can hold.
        json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        wrong.append(FieldViolation("sampling_parameters", f"is not JSON: {error}; expected an object"))
        return {}
    if not isinstance(values, dict):
        wrong.append(FieldViolation("sampling_parameters", f"is {type(values).__name__}; expected a JSON object"))
        return {}
    return values


def _words(problem: ErrorDetails) -> str:
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        return f"is not known; expected one of {', '.join(SamplingFields.model_fields)}"
    return mistake(problem)


_EMPTY_FINAL: Final = "triton_enable_empty_final_response"
# Parameters of the protocol itself; all others are sampling parameters.
_SETTINGS: Final[dict[str, type]] = {"priority": int, "timeout": int, "traceparent": str, _EMPTY_FINAL: bool}
# The protocol's priorities count from 1, the most urgent; Quire's from -100 to 100, the most urgent.
_MIDDLE_PRIORITY, _LAST_PRIORITY = 101, 201
_MICROSECONDS: Final = 1e6


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read. `violations` are all mistakes that this protocol can find.

    `prefix` precedes the text of every sequence. `raw` tells the form of the tensors. `timeout` is in seconds.
    """

    generate: inference_pb2.GenerateRequest
    sampling: Sampling
    stream: bool
    prefix: str
    outputs: tuple[Tensor, ...]
    raw: bool
    empty_final: bool
    timeout: float | None
    violations: tuple[FieldViolation, ...]

    async def validated(self, validator: RequestValidator, call: CallContext) -> ValidatedRequest:
        """Return the request that the frontend serves. Raises InvalidRequest with all violations at once."""
        if self.timeout is not None:
            deadline = call.arrived + self.timeout
            call = replace(call, deadline=deadline if call.deadline is None else min(deadline, call.deadline))
        try:
            request = await validator.validate(self.generate, call)
        except InvalidRequest as error:
            # This class has reported a missing prompt already, with the names of this protocol.
            more = (self._translated(each) for each in error.violations if each.field != "input")
            raise InvalidRequest(*self.violations, *more) from None
        if self.violations:
            raise InvalidRequest(*self.violations)
        return request

    def _translated(self, violation: FieldViolation) -> FieldViolation:
        """Return a violation of Quire's own request with the field's path in the client's request."""
        field = violation.field.removeprefix("sampling.")
        if field.startswith("prompt"):
            rest = field.removeprefix("prompt").removeprefix(".text").removeprefix(".token_ids.ids")
            field = (TEXT_INPUT if self.generate.prompt.HasField("text") else INPUT_IDS).name + rest
        name = re.split(r"[.\[]", field, maxsplit=1)[0]
        ours = {"include_stop": "include_stop_str_in_output"}.get(name, name)
        if ours in SamplingFields.model_fields:
            field = self.sampling.path(ours) + field.removeprefix(name)
        return replace(violation, field=field)


class _Reader:
    def __init__(self, request: pb.ModelInferRequest) -> None:
        self._request = request
        self._inputs, self.wrong = inputs_of(request)
        self._given = {tensor.name for tensor in request.inputs}
        self.generate = inference_pb2.GenerateRequest()

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._inputs[name][0]) if name in self._inputs else default

    def read_prompt(self) -> None:
        given = self._given & {TEXT_INPUT.name, INPUT_IDS.name}
        if len(given) != 1:
            what = (
                "cannot be combined with input_ids; expected one of them"
                if given
                else "is missing; expected it or input_ids"
            )
            self._refuse(TEXT_INPUT.name, what)
        elif INPUT_IDS.name in self._inputs:
            self.generate.prompt.token_ids.ids.extend(self._inputs[INPUT_IDS.name])
        elif TEXT_INPUT.name in self._inputs:
            self.generate.prompt.text = self._text(TEXT_INPUT.name)

    def read_sampling(self, parameters: dict[str, Any]) -> Sampling:
        text = self._inputs.get("sampling_parameters", [None])[0]
        sampling, problems = sampling_of(parameters, text)
        self.wrong += problems
        sampling.fields.write(self.generate)
        return sampling

    def read_parameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the protocol's own settings, those that are wrong left out, and the sampling parameters."""
        settings, others = dict[str, Any](), dict[str, Any]()
        for name, parameter in self._request.parameters.items():
            choice = parameter.WhichOneof("parameter_choice")
            value = getattr(parameter, choice) if choice else None
            expected = _SETTINGS.get(name)
            if expected is None:
                others[name] = value
            elif type(value) is expected:
                settings[name] = value
            else:
                self._refuse(f"parameters.{name}", f"is {value!r}; expected {expected.__name__}")
        return settings, others

    def read_priority(self, priority: int) -> None:
        """Set the priority; 0 is the default."""
        if 0 <= priority <= _LAST_PRIORITY:
            self.generate.priority = _MIDDLE_PRIORITY - (priority or _MIDDLE_PRIORITY)
        else:
            what = f"is {priority}; expected 1 (first) to {_LAST_PRIORITY}, or 0 for the default of {_MIDDLE_PRIORITY}"
            self._refuse("parameters.priority", what)

    def timeout(self, microseconds: int) -> float | None:
        """Return the seconds that the client gives; 0 means no limit."""
        if microseconds < 0:
            self._refuse("parameters.timeout", f"is {microseconds}; expected microseconds, or 0 for no limit")
        return microseconds / _MICROSECONDS if microseconds > 0 else None

    def stream(self, offered: bool) -> bool:
        stream = self.flag("stream")
        if stream and not offered:
            self._refuse("stream", "is true, and ModelInfer answers once; call ModelStreamInfer")
        return stream

    def prefix(self, stream: bool) -> str:
        """Return the prompt where the client requests it before the output; that is the default without streaming."""
        name = "exclude_input_in_output"
        text = self.generate.prompt.text
        if self.flag(name, default=stream or not text):
            return ""
        if stream:
            self._refuse(name, "is false, and so the prompt would come again with each response; expected true")
        elif not text:
            self._refuse(name, "is false, and there is no text_input to put before the output; expected true")
        return text

    def outputs(self) -> tuple[Tensor, ...]:
        """Return the outputs of the answer: text_output unless others are named, and those that `return_...` adds."""
        known = {tensor.name for tensor in OUTPUTS}
        named = [output.name for output in self._request.outputs]
        if len(named) > len(OUTPUTS):
            what = f"names {len(named)} tensors; expected each of the {len(OUTPUTS)} that there are at most once"
            self._refuse("outputs", what)
        for place, output in enumerate(self._request.outputs[: len(OUTPUTS)]):
            if output.name not in known:
                what = f"is {output.name!r}; expected one of {', '.join(tensor.name for tensor in OUTPUTS)}"
                self._refuse(f"outputs[{place}].name", what)
            elif output.parameters:
                what = f"has {', '.join(sorted(output.parameters))}, which is not offered; expected none"
                self._refuse(f"outputs[{place}].parameters", what)
        wanted = {*(named or [TEXT_OUTPUT.name]), *(name for name in known if self.flag(f"return_{name}"))}
        return tuple([tensor for tensor in OUTPUTS if tensor.name in wanted])

    def _text(self, name: str) -> str:
        try:
            return bytes(self._inputs[name][0]).decode()
        except UnicodeDecodeError as error:
            self._refuse(name, f"is not UTF-8 at byte {error.start}; expected text")
            return ""

    def _refuse(self, field: str, what: str) -> None:
        self.wrong.append(FieldViolation(field, what))


def read(request: pb.ModelInferRequest, streaming: bool) -> Asked:
    """Return the client's request; `streaming` means that the answer may come in parts. Never raises."""
    reader = _Reader(request)
    reader.read_prompt()
    settings, parameters = reader.read_parameters()
    sampling = reader.read_sampling(parameters)
    reader.read_priority(settings.get("priority", 0))
    reader.generate.traceparent = settings.get("traceparent", "")
    outputs = reader.outputs()
    if {LOGPROBS, CUMULATIVE_LOGPROB} & set(outputs) and not reader.generate.sampling.HasField("logprobs"):
        reader.generate.sampling.logprobs = 0
    stream = reader.stream(streaming)
    return Asked(
        generate=reader.generate,
        sampling=sampling,
        stream=stream,
        prefix=reader.prefix(stream),
        outputs=outputs,
        raw=bool(request.raw_input_contents) or not any(each.HasField("contents") for each in request.inputs),
        empty_final=settings.get(_EMPTY_FINAL, False),
        timeout=reader.timeout(settings.get("timeout", 0)),
        violations=tuple(reader.wrong),
    )
