"""What a router sends to a worker for a sequence, and how it takes a message that contradicts itself."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from google.rpc import status_pb2

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import little_endian_int32
from common.contracts.transfers import Fetched
from common.contracts.types import (
    Constraint,
    ConstraintKind,
    KvGeometry,
    KvGroup,
    KvGroupKind,
    PoolIdentity,
    SamplingParams,
)
from common.wire.identity_codec import identity_to_proto
from common.wire.sampling_codec import sampling_from_proto
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2
from router.placement.worker_model import Capacity, Load
from router.workers.codec import (
    Submission,
    events_of,
    facts_from_proto,
    load_from_proto,
    refusal_from_proto,
    submit_to_proto,
)
from router.workers.worker_events import (
    Lost,
    PromptScored,
    Refused,
    SequenceAdmitted,
    SequenceStarted,
    TokensSampled,
    WorkerTime,
)

GROUPS = (KvGroup(KvGroupKind.FULL, 0, 2, (0, 3)), KvGroup(KvGroupKind.CHUNK, 64, 1, (1, 2)))
FLAGS = ("manager_attached", "draining", "migrating")


@pytest.mark.parametrize(("window", "groups"), [(0, ()), (32, ()), (0, GROUPS)])
def test_a_capacity_has_the_window_or_the_groups_of_the_pool(window: int, groups: tuple[KvGroup, ...]) -> None:
    identity = PoolIdentity("m", "t", 16, KvGeometry(4, 1, 8, 8, "float32", window, groups=groups))
    info = pb.WorkerInfo(worker_id="w0", identity=identity_to_proto(identity), num_blocks=9, max_num_seqs=2)
    assert facts_from_proto(info).capacity == Capacity(9, 16, 2, 0, window, prefix_caching=False, groups=groups)


def test_stop_strings_stay_at_the_router_and_the_rest_of_the_sampling_goes() -> None:
    sampling = SamplingParams(temperature=0.5, stop=("secret",), stop_token_ids=(7,), seed=3, logprobs=0)
    message = submit_to_proto(Submission("r", 0, (1, 2), (), bytes(32), sampling), handle=4)
    assert sampling_from_proto(message.sampling) == replace(sampling, stop=())
    assert b"secret" not in message.SerializeToString()


def test_a_constraint_goes_to_the_worker_as_it_was_given() -> None:
    sampling = SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "a+"))
    message = submit_to_proto(Submission("r", 0, (1,), (), bytes(32), sampling), handle=4)
    assert (message.WhichOneof("constraint"), message.regex) == ("regex", "a+")


def test_log_probabilities_that_do_not_pair_up_are_a_violation() -> None:
    packed = (1).to_bytes(4, "little")
    entry = types_pb2.TokenLogprobs(token_id=1, top_token_ids=[1, 2], top_logprobs=[-0.5])
    outputs = pb.StepOutputs(handles=packed, counts=packed, token_ids=packed, logprobs=[entry], logprob_handles=packed)
    with pytest.raises(ProtocolViolation, match="2 tokens have 1"):
        list(events_of(outputs))


def test_each_event_has_the_time_of_its_turn() -> None:
    """A message has several turns where the router reads late; what is put out once more has no time."""
    pack = little_endian_int32
    outputs = pb.StepOutputs(
        turns=[
            pb.EngineTurn(at_seconds=5.0, lost_seconds=0.5, first_row=0),
            pb.EngineTurn(at_seconds=6.0, lost_seconds=1.5, first_row=2),
            pb.EngineTurn(first_row=3),
        ],
        handles=pack([1, 2, 1, 3]),
        counts=pack([1, 1, 1, 1]),
        token_ids=pack([10, 20, 11, 30]),
        admitted=[pb.SequenceAdmitted(handle=1, turn=1), pb.SequenceAdmitted(handle=3)],
        started=[pb.SequenceStarted(handle=1, turn=1)],
        delayed=[pb.SequenceDelayed(handle=2, turn=2)],
        finished=[pb.SequenceFinished(handle=1, turn=2), pb.SequenceFinished(handle=2, turn=9)],
    )
    first, second = WorkerTime(5.0, 0.5), WorkerTime(6.0, 1.5)
    found = []
    for handle, event in events_of(outputs):
        assert not isinstance(event, PromptScored | Refused | Lost)
        found.append((type(event).__name__, handle, event.when))
    assert found == [
        ("SequenceDelayed", 2, second),
        ("SequenceAdmitted", 1, first),
        ("SequenceAdmitted", 3, None),
        ("SequenceStarted", 1, first),
        ("TokensSampled", 1, first),
        ("TokensSampled", 2, first),
        ("TokensSampled", 1, second),
        ("TokensSampled", 3, None),
        ("SequenceFinished", 1, second),
        ("SequenceFinished", 2, None),
    ]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_none(odd: float) -> None:
    handles = little_endian_int32([1])
    for turn in (pb.EngineTurn(at_seconds=odd), pb.EngineTurn(at_seconds=1.0, lost_seconds=odd)):
        outputs = pb.StepOutputs(turns=[turn], handles=handles, counts=handles, token_ids=handles)
        ((_, event),) = events_of(outputs)
        assert isinstance(event, TokensSampled)
        assert event.when is None or (event.when.at, event.when.lost) == (1.0, -1.0)


def test_a_heartbeat_is_read_whole() -> None:
    """Proto fields and those of `Load` have the same names."""
    names = {each.name for each in fields(Load)}
    values: dict[str, Any] = {name: number for number, name in enumerate(sorted(names - {*FLAGS}), 1)}
    values |= dict.fromkeys(FLAGS, True)
    assert load_from_proto(pb.Load(**values)) == Load(**values)
    assert not load_from_proto(pb.Load(migrating=True)).migrating, "it drains first"


def test_a_refusal_without_a_status_is_a_violation() -> None:
    """Found by `make fuzz`: protobuf's own error ended the stream of all requests of the worker with a traceback."""
    with pytest.raises(ProtocolViolation, match="16 bytes of a refusal"):
        refusal_from_proto(pb.Refused(status=bytes(range(16))))


def test_a_status_with_a_code_that_nobody_knows_is_an_error_of_ours() -> None:
    """Found by `make fuzz`: it was a KeyError."""
    refused = pb.Refused(status=status_pb2.Status(code=-(2**31), message="odd").SerializeToString())
    assert str(refusal_from_proto(refused).error) == "UNKNOWN: odd"


@pytest.mark.parametrize(("said", "known"), [(0.25, 0.25), (float("nan"), 0.0), (float("inf"), 0.0), (-1.0, 0.0)])
def test_a_start_says_what_was_loaded_from_host_memory(said: float, known: float) -> None:
    started = pb.SequenceStarted(handle=1, loaded_blocks=47, load_seconds=said, spared_seconds=said)
    ((_, event),) = events_of(pb.StepOutputs(started=[started]))
    assert event == SequenceStarted(0.0, 0, "", None, 47, known, known)


@pytest.mark.parametrize(("said", "known"), [(0.25, 0.25), (float("nan"), 0.0), (-1.0, 0.0)])
def test_an_admission_says_what_was_fetched_before_it(said: float, known: float) -> None:
    fetched = pb.Fetched(blocks=47, asked=64, seconds=said, source="disk")
    ((_, event),) = events_of(pb.StepOutputs(admitted=[pb.SequenceAdmitted(handle=1, fetched=fetched)]))
    assert isinstance(event, SequenceAdmitted)
    assert event.fetched == Fetched(47, 64, known, "disk")


@pytest.mark.parametrize("source", ["", "a\nb", "x" * 1000])
def test_a_source_that_is_no_id_is_left_out_and_no_more_came_than_was_asked_for(source: str) -> None:
    fetched = pb.Fetched(blocks=9, asked=3, source=source)
    ((_, event),) = events_of(pb.StepOutputs(admitted=[pb.SequenceAdmitted(handle=1, fetched=fetched)]))
    assert isinstance(event, SequenceAdmitted)
    assert event.fetched == Fetched(3, 3, 0.0, "")
