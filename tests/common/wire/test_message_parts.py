"""Parts of messages that several services send: they arrive as they were sent, whole, whatever fields there are."""

from __future__ import annotations

import math
from dataclasses import fields
from enum import StrEnum
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.errors import ProtocolViolation
from common.contracts.types import (
    FinishReason,
    KvGeometry,
    MissReason,
    PoolIdentity,
    SamplingParams,
    SequencePhase,
    TokenLogprobs,
    Usage,
)
from common.wire import enum_codec
from common.wire.output_codec import logprobs_from_proto, logprobs_to_proto, usage_from_proto, usage_to_proto
from common.wire.sampling_codec import sampling_from_proto, sampling_to_proto
from quire.kvmanager.v1 import kvmanager_pb2
from quire.types.v1 import types_pb2

int32 = st.integers(-(2**31), 2**31 - 1)
u32 = st.integers(0, 2**32 - 1)
float32 = st.floats(width=32, allow_nan=False)

# What has a field of its own in the messages around; tests of those messages send it.
ELSEWHERE = {"constraint", "bad_words", "thought"}
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), float32),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), float32),
    **dict.fromkeys(("top_k", "max_tokens", "min_tokens", "n"), int32),
    "stop": st.lists(st.text(max_size=4), max_size=3).map(tuple),
    "stop_token_ids": st.lists(int32, max_size=3).map(tuple),
    "logprob_token_ids": st.lists(int32, max_size=3).map(tuple),
    "logit_bias": st.dictionaries(int32, float32, max_size=3).map(lambda bias: tuple(sorted(bias.items()))),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "logprobs": st.none() | int32,
    "prompt_logprobs": st.none() | int32,
    "closing_token_id": st.none() | int32,
    "ignore_eos": st.booleans(),
    "include_stop": st.booleans(),
}


@given(st.builds(SamplingParams, **SAMPLING))
def test_sampling_survives_the_wire(sampling: SamplingParams) -> None:
    packed = sampling_to_proto(sampling).SerializeToString()
    assert sampling_from_proto(types_pb2.SamplingParams.FromString(packed)) == sampling


def test_every_field_of_sampling_is_among_those_that_are_tried() -> None:
    assert set(SAMPLING) == {field.name for field in fields(SamplingParams)} - ELSEWHERE


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (SamplingParams, types_pb2.SamplingParams),
        (Usage, types_pb2.Usage),
        (PoolIdentity, types_pb2.PoolIdentity),
        (KvGeometry, types_pb2.KvGeometry),
    ],
)
def test_a_message_has_the_fields_of_what_it_carries(ours: type[Any], message: type[Message]) -> None:
    assert set(message.DESCRIPTOR.fields_by_name) - {"bad_words"} == {field.name for field in fields(ours)} - ELSEWHERE


@given(st.builds(Usage, u32, u32, u32, u32, u32))
def test_usage_survives_the_wire(usage: Usage) -> None:
    packed = usage_to_proto(usage).SerializeToString()
    assert usage_from_proto(types_pb2.Usage.FromString(packed)) == usage


@given(st.builds(TokenLogprobs, int32, float32, st.lists(st.tuples(int32, float32), max_size=4).map(tuple)))
def test_log_probabilities_survive_the_wire(entry: TokenLogprobs) -> None:
    packed = logprobs_to_proto(entry).SerializeToString()
    assert logprobs_from_proto(types_pb2.TokenLogprobs.FromString(packed)) == entry


def test_log_probabilities_that_do_not_pair_up_are_a_violation() -> None:
    with pytest.raises(ProtocolViolation, match="1 tokens have 0"):
        logprobs_from_proto(types_pb2.TokenLogprobs(token_id=3, logprob=-math.inf, top_token_ids=[3]))


@pytest.mark.parametrize(
    ("ours", "numbers", "prefix"),
    [
        (FinishReason, types_pb2.FinishReason, "FINISH_REASON_"),
        (MissReason, types_pb2.MissReason, "MISS_REASON_"),
        (SequencePhase, kvmanager_pb2.SequencePhase, "SEQUENCE_PHASE_"),
    ],
)
def test_enums_have_the_same_names_on_the_wire(ours: type[StrEnum], numbers: Any, prefix: str) -> None:
    assert {name.removeprefix(prefix) for name in numbers.keys()} == {"UNSPECIFIED", *ours.__members__}  # noqa: SIM118


def test_enums_survive_the_wire() -> None:
    for finish in FinishReason:
        assert enum_codec.finish_from_proto(enum_codec.finish_to_proto(finish)) is finish
    for miss in MissReason:
        assert enum_codec.miss_from_proto(enum_codec.miss_to_proto(miss)) is miss
    for phase in SequencePhase:
        assert enum_codec.phase_from_proto(enum_codec.phase_to_proto(phase)) is phase


@pytest.mark.parametrize(
    "read",
    [enum_codec.finish_from_proto, enum_codec.miss_from_proto, enum_codec.phase_from_proto],
    ids=["finish", "miss", "phase"],
)
@pytest.mark.parametrize("number", [0, 99], ids=["unspecified", "of another version"])
def test_a_number_that_means_nothing_is_a_violation(read: Any, number: int) -> None:
    with pytest.raises(ProtocolViolation, match=f"{number} is no"):
        read(number)


def test_a_reader_may_say_what_an_unknown_number_stands_for() -> None:
    assert enum_codec.finish_from_proto(99, FinishReason.ERROR) is FinishReason.ERROR
    assert enum_codec.miss_from_proto(99, MissReason.NEVER_SEEN) is MissReason.NEVER_SEEN
