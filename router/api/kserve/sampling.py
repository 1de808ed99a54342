"""Sampling parameters as clients of Triton's vLLM backend send them: in a JSON tensor, or as parameters of the request.

The names are vLLM's. Such clients send numbers as text too, and pydantic converts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from common.contracts.errors import FieldViolation
from common.settings.pydantic_words import mistake
from common.untrusted import json_shape
from quire.inference.v1 import inference_pb2
from router.api.shared.numbers import Float32, Int32, Int64
from router.api.shared.retention import CacheRetention

CONSTRAINTS: Final = ("json_schema", "regex", "grammar")
# Fields whose name is the same in SamplingParams of quire.types.v1.
_SAME: Final = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "n", "ignore_eos", "logprobs"),
)

# More names than this are refused as a whole.
_MOST_NAMES: Final = 100


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
    wrong += [FieldViolation(paths[name], f"is given beside {first}; expected one of them") for name in others]
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
