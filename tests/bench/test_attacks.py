"""The attack benchmark: its figures, and a few hostile requests against a suite of simulated workers."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from bench.attack import floods, wire
from bench.attack.innocents import Streams, differing
from bench.attack.kinds import KINDS
from quire.inference.v1 import inference_pb2 as pb
from quire.kserve.v2 import kserve_pb2 as kserve
from tests.support.bench_process import run_benchmark

ROOT = Path(__file__).parents[2]


def test_hostile_messages_are_what_they_claim_to_be() -> None:
    stops = pb.GenerateRequest.FromString(wire.long_stop_strings(108, 3, 2))
    assert (list(map(len, stops.sampling.stop)), stops.sampling.n) == ([20] * 3, 2)
    assert list(stops.prompt.token_ids.ids) == [33] * 8
    unknown = pb.DetokenizeRequest.FromString(wire.field(1, wire.UNKNOWN_ID * 3))
    assert list(unknown.token_ids) == [16383] * 3
    export = trace_service_pb2.ExportTraceServiceRequest.FromString(wire.span_export(2, 188))
    (scope,) = export.resource_spans[0].scope_spans
    assert [len(span.attributes[0].value.string_value) for span in scope.spans] == [30, 30]

    infer = kserve.ModelInferRequest.FromString(wire.infer(b'{"n":1}'))
    assert [(each.name, each.datatype, [*each.shape]) for each in infer.inputs] == [
        ("text_input", "BYTES", [1]),
        ("sampling_parameters", "BYTES", [1]),
    ]
    assert infer.raw_input_contents[1] == b'\x07\x00\x00\x00{"n":1}'


def test_floods_are_whole_frames_of_streams_that_grow() -> None:
    """A frame is nine bytes and its payload; the ids of a client's streams are odd, and none comes twice."""
    for name, flood in floods.FLOODS.items():
        sent = b"".join(itertools.islice(flood.chunks(), 2))
        frames = list(frames_of(sent))
        assert frames, name
        opened = [stream for kind, stream in frames if kind == floods.HEADERS]
        assert opened == sorted(set(opened)), name
        assert all(stream % 2 for stream in opened), name


def frames_of(sent: bytes) -> Iterator[tuple[int, int]]:
    """Yield the kind and the stream of each frame, which end where the bytes end."""
    at = 0
    while at < len(sent):
        yield sent[at + 3], int.from_bytes(sent[at + 5 : at + 9], "big")
        at += 9 + int.from_bytes(sent[at : at + 3], "big")
    assert at == len(sent)


@pytest.mark.parametrize("size", wire.SIZES)
def test_hostile_messages_are_just_below_a_limit(size: int) -> None:
    unknown = wire.many_tokens(wire.UNKNOWN_ID, size)
    stops = wire.long_stop_strings(size)
    for made in (wire.many_stop_ids(size), wire.long_prompt(wire.VALID_ID, size), unknown, stops):
        assert size - 512 < len(made) < size + 64


def test_bodies_of_json_are_json() -> None:
    body = wire.json_body(b'{"tokens":[', b'"a"', b"]}", size=40)
    assert json.loads(body) == {"tokens": ["a"] * 10}


def test_garbage_depends_on_its_seed_alone() -> None:
    for make in (wire.http1_garbage, wire.http2_garbage, wire.garbage):
        assert make(random.Random(3)) == make(random.Random(3)) != make(random.Random(4))


@pytest.mark.parametrize(("found", "count"), [([1, 2, 3], 0), ([1, 9, 3], 1), ([1, 2], 1), ([1, 2, 3, 4], 1), ([], 3)])
def test_tokens_that_differ_are_counted_by_place(found: list[int], count: int) -> None:
    quiet = Streams(tokens={0: [[1, 2, 3]]})
    assert differing(quiet, Streams(tokens={0: [found, [1, 2, 3]]})) == count


@pytest.mark.parametrize("flags", [(), pytest.param(("--tenants",), marks=pytest.mark.rest)])
def test_a_few_attacks_are_sent_and_measured(flags: tuple[str, ...]) -> None:
    kinds = ["malformed", "half_sent", "http1_garbage", "http2_garbage", "forged_line", "predicted_ids"]
    words = ["--kinds", *kinds, "--count", "12", "--innocents", "4", "--output-tokens", "8"]
    figures, lines = run_benchmark("attacks", *words, *flags, "--simulate", "base=1ms")
    assert set(kinds) <= set(KINDS)
    assert figures["hostile_sent"] == 12
    assert {line.split()[1] for line in lines if line.startswith("  hostile")} == set(kinds)
    assert figures["innocent_finished"] >= 4
    assert figures["innocent_tokens_differing"] == 0
    assert figures["router_peak_rss_mib"] > 30
    assert 0 < figures["loop_turn_cpu_p99_ms"] <= 1.02 * figures["loop_turn_cpu_max_ms"]
