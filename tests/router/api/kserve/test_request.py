"""What a ModelInferRequest asks: tensors in both forms, parameters by both ways, and everything wrong named at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.errors import InvalidRequest
from quire.kserve.v2 import kserve_pb2 as pb
from router.api.kserve.request import Asked, SamplingFields, read
from router.api.kserve.servicer import error_response
from tests.support.router.kserve_messages import add_input, infer

NAMES = [
    *("text_input", "input_ids", "stream", "sampling_parameters", "exclude_input_in_output", "return_finish_reason"),
    *("return_cumulative_logprob", "return_logprobs", "return_num_input_tokens", "return_num_output_tokens"),
    "return_output_ids",
]

FIELDS = list(SamplingFields.model_fields)


def asked(streaming: bool = True, **inputs: Any) -> Asked:
    """Return a request as it is read, which has nothing wrong."""
    result = read(infer(**inputs), streaming)
    assert result.violations == ()
    return result


def wrong(request: pb.ModelInferRequest, streaming: bool = True) -> dict[str, str]:
    """Return what is wrong with a request, by field."""
    return {each.field: each.description for each in read(request, streaming).violations}


# ------------------------------------------------------------ the prompt


@pytest.mark.parametrize("typed", [False, True])
def test_text_is_read_from_raw_and_from_typed_contents(typed: bool) -> None:
    result = asked(typed=typed, text_input="Où est Lyon?", exclude_input_in_output=True)
    assert result.generate.prompt.text == "Où est Lyon?"
    assert result.raw is not typed


@pytest.mark.parametrize("typed", [False, True])
def test_token_ids_are_read_from_raw_and_from_typed_contents(typed: bool) -> None:
    assert list(asked(typed=typed, input_ids=[5, 2026, 0]).generate.prompt.token_ids.ids) == [5, 2026, 0]


def test_a_prompt_is_needed() -> None:
    assert wrong(infer(stream=True)) == {"text_input": "is missing; expected it or input_ids"}


def test_two_prompts_are_one_too_many() -> None:
    assert wrong(infer(text_input="a", input_ids=[1], stream=True)) == {
        "text_input": "cannot be combined with input_ids; expected one of them"
    }


def test_text_that_is_no_utf_8_is_refused_with_the_place() -> None:
    request = infer(text_input=b"ab\xff", stream=True)
    assert wrong(request) == {"text_input": "is not UTF-8 at byte 2; expected text"}


# ------------------------------------------------------------ tensors


def test_every_wrong_tensor_is_named_at_once() -> None:
    request = infer(text_input="a", prompt="b", stream=True, return_logprobs=True)
    request.inputs[0].datatype = "FP32"
    request.inputs[0].shape[:] = [1, 1]
    request.inputs[3].shape[:] = [2]
    add_input(request, "stream", False)
    found = [(each.field, each.description) for each in read(request, True).violations]
    assert found[:4] == [
        ("text_input", "has datatype 'FP32'; expected BYTES"),
        ("text_input", "has shape [1, 1]; expected [1]"),
        ("inputs[1].name", f"is 'prompt'; expected one of {', '.join(NAMES)}"),
        ("return_logprobs", "has shape [2]; expected [1]"),
    ]
    assert found[4:] == [("stream", "is given twice")]


@pytest.mark.parametrize(
    ("name", "value", "raw", "what"),
    [
        ("input_ids", [1, 2], b"\x01\x00\x00", "has 3 bytes; expected 8 for 2 of INT32"),
        ("stream", True, b"", "has 0 bytes; expected 1 for 1 of BOOL"),
        (
            "text_input",
            "a",
            b"\x05\x00\x00\x00ab",
            "has 6 bytes; expected 1 of BYTES, each after its length as a uint32",
        ),
        (
            "text_input",
            "a",
            b"\x01\x00\x00\x00ab",
            "has 6 bytes; expected 1 of BYTES, each after its length as a uint32",
        ),
        ("text_input", "a", b"\x01\x00", "has 2 bytes; expected 1 of BYTES, each after its length as a uint32"),
    ],
)
def test_raw_contents_of_another_size_than_the_shape_are_refused(name: str, value: Any, raw: bytes, what: str) -> None:
    request = infer(**{name: value})
    request.raw_input_contents[0] = raw
    assert wrong(request)[name] == what


def test_typed_contents_of_another_size_than_the_shape_are_refused() -> None:
    request = infer(typed=True, input_ids=[1, 2])
    request.inputs[0].shape[:] = [3]
    assert wrong(request) == {"input_ids": "has 2 elements in contents.int_contents; expected 3, as its shape"}


def test_raw_contents_are_for_all_inputs_or_for_none() -> None:
    request = infer(text_input="a", stream=True)
    del request.raw_input_contents[1]
    what = "has 1 entries for 2 inputs; expected one for each, or none at all"
    assert wrong(request)["raw_input_contents"] == what


def test_typed_beside_raw_contents_are_refused() -> None:
    request = infer(input_ids=[1])
    request.inputs[0].contents.int_contents.append(1)
    assert wrong(request) == {"input_ids": "has contents beside raw_input_contents; expected one of them"}


def test_more_tensors_than_there_are_are_counted_not_named() -> None:
    request = infer(input_ids=[1], outputs=("text_output",) * 8)
    for number in range(11):
        add_input(request, f"x{number}", True)
    assert wrong(request) == {
        "inputs": "has 12 tensors; expected each of the 11 that there are at most once",
        "outputs": "names 8 tensors; expected each of the 7 that there are at most once",
    }


def test_very_many_parameters_are_counted_not_named() -> None:
    request = infer(input_ids=[1], sampling_parameters={f"x{number}": 1 for number in range(101)})
    assert wrong(request) == {"parameters": "are 101; expected at most 100"}


def test_shared_memory_is_refused() -> None:
    request = infer(input_ids=[1])
    request.inputs[0].parameters["shared_memory_region"].string_param = "region"
    assert wrong(request) == {"input_ids": "is in shared memory, which is not offered; send its elements"}


# ------------------------------------------------------------ sampling


def test_sampling_parameters_may_be_numbers_or_text_as_clients_of_vllm_send_them() -> None:
    given = {"temperature": "0.1", "top_p": 0.95, "max_tokens": "100", "n": 2, "ignore_eos": "true"}
    sampling = asked(input_ids=[1], sampling_parameters=given).generate.sampling
    assert (sampling.temperature, sampling.top_p) == pytest.approx((0.1, 0.95))
    assert (sampling.max_tokens, sampling.n, sampling.ignore_eos) == (100, 2, True)
    assert not sampling.HasField("seed")


def test_lists_and_maps_come_in_json() -> None:
    given = {"stop": ["a", "b"], "stop_token_ids": [7], "logit_bias": {"5": -1.5}, "include_stop_str_in_output": True}
    sampling = asked(input_ids=[1], sampling_parameters=given).generate.sampling
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["a", "b"], [7])
    assert (dict(sampling.logit_bias), sampling.include_stop) == ({5: -1.5}, True)


def test_parameters_of_the_request_are_sampling_parameters_too_and_the_tensor_counts_more() -> None:
    parameters = {"temperature": 0.5, "max_tokens": 4, "seed": "9", "stop": "x", "ignore_eos": True}
    sampling = asked(input_ids=[1], parameters=parameters, sampling_parameters={"max_tokens": 8}).generate.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.5, 8, 9)
    assert (list(sampling.stop), sampling.ignore_eos) == (["x"], True)


def test_every_wrong_parameter_is_named_with_the_way_it_came() -> None:
    request = infer(
        input_ids=[1],
        parameters={"top_k": "many", "sequence_id": 3},
        sampling_parameters={"temperature": "warm", "best_of": 2, "stop": [1]},
    )
    found = wrong(request)
    assert set(found) == {
        *("parameters.top_k", "parameters.sequence_id", "sampling_parameters.temperature"),
        *("sampling_parameters.best_of", "sampling_parameters.stop"),
    }
    assert found["parameters.sequence_id"].startswith("is not known; expected one of temperature, top_p,")
    assert found["sampling_parameters.temperature"].startswith("is 'warm'; expected a valid number")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("[1]", "is list; expected a JSON object"),
        (b"\xff", "is not JSON: 'utf-8' codec"),
        ('{"stop": "\\ud800"}', "is not JSON: 'utf-8' codec can't encode"),
        ("[" * 100_000, "has 100000 lists and objects; expected at most 8192"),
        ("[" * 65 + "]" * 65, "is nested too deeply"),
    ],
)
def test_sampling_parameters_are_one_json_object(text: str | bytes, what: str) -> None:
    assert wrong(infer(input_ids=[1], sampling_parameters=text))["sampling_parameters"].startswith(what)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json_schema": {"type": "integer"}}, "json_schema", '{"type": "integer"}'),
        ({"json_schema": '{"type":"integer"}'}, "json_schema", '{"type":"integer"}'),
        ({"regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"grammar": "start: /a/"}, "grammar", "start: /a/"),
    ],
)
def test_a_constraint_is_handed_on(given: dict[str, Any], kind: str, text: str) -> None:
    generate = asked(input_ids=[1], sampling_parameters=given).generate
    assert generate.WhichOneof("constraint") == kind
    assert getattr(generate, kind) == text


def test_two_constraints_are_one_too_many() -> None:
    request = infer(input_ids=[1], parameters={"grammar": "start: /a/"}, sampling_parameters={"regex": "a"})
    assert wrong(request) == {"parameters.grammar": "cannot be combined with regex; expected one of them"}


def test_cache_options_are_handed_on() -> None:
    cache = asked(input_ids=[1], sampling_parameters={"cache_salt": "s", "no_cache": True}).generate.cache
    assert (cache.salt, cache.no_cache) == ("s", True)


def test_retention_is_handed_on() -> None:
    given = {"priority": 80, "duration": 2.5, "ranges": [{"start": 4, "end": 8, "priority": 90}]}
    kept = asked(input_ids=[1], sampling_parameters={"cache_retention": given}).generate.cache_retention
    assert (kept.priority, kept.duration, kept.HasField("decode_priority")) == (80, 2.5, False)
    assert [(each.start, each.end, each.priority) for each in kept.ranges] == [(4, 8, 90)]


@pytest.mark.parametrize(
    ("given", "field", "what"),
    [
        ({"ranges": [{"start": 0}]}, ".ranges[0].priority", "is missing"),
        ({"priorities": 3}, ".priorities", "is not known; expected nothing of this name"),
        ("long", "", "expected an object"),
    ],
)
def test_wrong_retention_is_named_where_it_stands(given: object, field: str, what: str) -> None:
    found = wrong(infer(input_ids=[1], sampling_parameters={"cache_retention": given}))
    assert list(found) == [f"sampling_parameters.cache_retention{field}"]
    assert what in found[f"sampling_parameters.cache_retention{field}"]


# ------------------------------------------------------------ the protocol's own parameters


@pytest.mark.parametrize(("given", "ours"), [(1, 100), (101, 0), (201, -100), (0, 0)])
def test_priority_1_is_the_most_urgent(given: int, ours: int) -> None:
    assert asked(input_ids=[1], parameters={"priority": given}).generate.priority == ours


def test_timeout_is_in_microseconds() -> None:
    assert asked(input_ids=[1], parameters={"timeout": 2_500_000}).timeout == 2.5
    assert asked(input_ids=[1], parameters={"timeout": 0}).timeout is None


def test_the_protocols_parameters_are_checked_too() -> None:
    request = infer(
        input_ids=[1],
        parameters={"priority": 202, "timeout": -1, "triton_enable_empty_final_response": "yes"},
    )
    request.parameters["traceparent"].Clear()
    assert wrong(request) == {
        "parameters.priority": "is 202; expected 1 (first) to 201, or 0 for the default of 101",
        "parameters.timeout": "is -1; expected microseconds, or 0 for no limit",
        "parameters.triton_enable_empty_final_response": "is 'yes'; expected bool",
        "parameters.traceparent": "is None; expected str",
    }


def test_the_trace_of_a_request_is_handed_on() -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    assert asked(input_ids=[1], parameters={"traceparent": parent}).generate.traceparent == parent


# ------------------------------------------------------------ the form of the answer


def names(result: Asked) -> list[str]:
    return [tensor.name for tensor in result.outputs]


def test_only_the_text_is_returned_unless_more_is_asked_for() -> None:
    assert names(asked(input_ids=[1])) == ["text_output"]
    assert names(asked(input_ids=[1], outputs=("output_ids", "finish_reason"))) == ["finish_reason", "output_ids"]
    assert names(asked(input_ids=[1], return_num_output_tokens=True, return_logprobs=False)) == [
        "text_output",
        "num_output_tokens",
    ]


@pytest.mark.parametrize("name", ["logprobs", "cumulative_logprob"])
def test_log_probabilities_that_are_returned_are_asked_of_the_sampler(name: str) -> None:
    assert asked(input_ids=[1], outputs=(name,)).generate.sampling.logprobs == 0
    given = asked(input_ids=[1], outputs=(name,), sampling_parameters={"logprobs": 3})
    assert given.generate.sampling.logprobs == 3
    assert not asked(input_ids=[1]).generate.sampling.HasField("logprobs")


def test_unknown_outputs_and_their_parameters_are_refused() -> None:
    request = infer(input_ids=[1], outputs=("text", "text_output"))
    request.outputs[1].parameters["classification"].int64_param = 3
    assert wrong(request) == {
        "outputs[0].name": "is 'text'; expected one of text_output, finish_reason, cumulative_logprob, logprobs, "
        "num_input_tokens, num_output_tokens, output_ids",
        "outputs[1].parameters": "has classification, which is not offered; expected none",
    }


def test_a_whole_answer_begins_with_the_prompt_unless_that_is_excluded() -> None:
    assert asked(text_input="Lyon").prefix == "Lyon"
    assert asked(text_input="Lyon", exclude_input_in_output=True).prefix == ""
    assert asked(input_ids=[1]).prefix == ""


def test_a_streamed_answer_never_has_the_prompt() -> None:
    assert asked(text_input="Lyon", stream=True).prefix == ""
    assert "expected true" in wrong(infer(text_input="Lyon", stream=True, exclude_input_in_output=False)).popitem()[1]


def test_token_ids_cannot_come_before_the_text() -> None:
    assert wrong(infer(input_ids=[1], exclude_input_in_output=False)) == {
        "exclude_input_in_output": "is false, and there is no text_input to put before the output; expected true"
    }


def test_a_call_that_answers_once_cannot_stream() -> None:
    assert wrong(infer(input_ids=[1], stream=True), streaming=False) == {
        "stream": "is true, and ModelInfer answers once; call ModelStreamInfer"
    }


# ------------------------------------------------------------ whatever comes

TEXTS = st.text(max_size=8)
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=8,
)
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | TEXTS
CONTENTS = st.booleans() | st.binary(max_size=12) | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3)


@given(
    inputs=st.dictionaries(st.sampled_from(NAMES) | TEXTS, CONTENTS, max_size=4),
    sampling=st.dictionaries(st.sampled_from(FIELDS) | TEXTS, JSONS, max_size=4),
    parameters=st.dictionaries(st.sampled_from([*FIELDS, "timeout", "priority"]) | TEXTS, SCALARS, max_size=4),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=2),
    typed=st.booleans(),
)
def test_whatever_comes_is_read_or_refused_in_words_that_can_be_sent(
    inputs: dict[str, Any], sampling: dict[str, Any], parameters: dict[str, Any], shape: list[int], typed: bool
) -> None:
    request = infer(parameters=parameters, typed=typed, sampling_parameters=sampling)
    for name, value in inputs.items():
        add_input(request, name, value, typed)
    request.inputs[-1].shape[:] = shape
    result = read(request, True)
    error_response(request, InvalidRequest(*result.violations))
    assert result.generate.ByteSize() >= 0
