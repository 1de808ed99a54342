"""What Prometheus reads of a worker: levels and step times of its engine, round trips to its KV manager."""

from __future__ import annotations

from collections import Counter
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from gpuworker.engine.ports import EngineLoad, MaskLateness
from gpuworker.engine.step_rates import STEP_BOUNDS, StepTimes
from gpuworker.scheduling.draft_tally import DraftKind, DraftTally
from gpuworker.server.metrics import (
    CarrierCollector,
    DiskCollector,
    EngineCollector,
    MaskCollector,
    lease_round_trips,
)


def test_step_times_are_a_histogram_by_what_was_in_the_step() -> None:
    registry = CollectorRegistry()
    decodes = StepTimes((2, 0, 1, *[0] * (len(STEP_BOUNDS) - 2)), 0.005)
    EngineCollector(lambda: EngineLoad(decode_times=decodes), registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"quire:step_seconds_{name}", {"kind": "decode"} | labels)

    assert [value("bucket", le=le) for le in ("0.001", "0.002", "0.005", "5.0", "+Inf")] == [2, 2, 3, 3, 3]
    assert (value("count"), value("sum")) == (3, 0.005)
    assert value("count", kind="mixed") == 0


def test_levels_are_read_when_somebody_asks() -> None:
    registry, loads = CollectorRegistry(), [EngineLoad(), EngineLoad(running=3, num_blocks=8, unheld_blocks=2)]
    EngineCollector(lambda: loads[-1], registry)
    assert registry.get_sample_value("quire:num_requests_running") == 3
    assert registry.get_sample_value("quire:kv_cache_usage_perc") == pytest.approx(0.75)


def test_round_trips_are_a_histogram_in_seconds() -> None:
    registry = CollectorRegistry()
    observe = lease_round_trips(registry)
    observe(0.0015)
    name = "quire:lease_round_trip_seconds_bucket"
    assert [registry.get_sample_value(name, {"le": le}) for le in ("0.001", "0.002")] == [0, 1]


def test_late_masks_are_counted() -> None:
    registry = CollectorRegistry()
    MaskCollector(lambda: MaskLateness(steps=20, late=3, seconds=0.25), registry)
    names = ("constrained_steps", "late_mask_steps", "late_mask_seconds")
    assert [registry.get_sample_value(f"quire:{name}_total") for name in names] == [20, 3, 0.25]


def test_a_disk_cache_says_whether_it_is_in_use_and_how_long_a_read_takes() -> None:
    registry, mover = CollectorRegistry(), Mock(usable=True)
    DiskCollector(mover, Mock(read_seconds=0.0025), registry)
    assert [registry.get_sample_value(f"quire:disk_{name}") for name in ("usable", "read_seconds")] == [1.0, 0.0025]
    mover.usable = False
    assert registry.get_sample_value("quire:disk_usable") == 0.0


def test_images_of_peers_are_counted_by_carrier() -> None:
    registry = CollectorRegistry()
    CarrierCollector(lambda: Counter(nixl=7, shm=2), lambda: Counter(tcp=3), registry)
    found = [
        [registry.get_sample_value(f"quire:{name}_images_total", {"carrier": each}) for each in ("shm", "tcp", "nixl")]
        for name in ("fetched", "served")
    ]
    assert found == [[2, 0, 7], [0, 3, 0]]


def test_drafts_are_counted_by_what_guessed_them() -> None:
    registry = CollectorRegistry()
    drafts = {DraftKind.MODEL: DraftTally(20, 15), DraftKind.NGRAM: DraftTally(3, 1)}
    load = EngineLoad(drafts=drafts)
    assert (load.drafted_tokens, load.accepted_tokens) == (23, 16)
    EngineCollector(lambda: load, registry)
    found = [
        [registry.get_sample_value(f"quire:spec_decode_num_{name}_tokens_total", {"kind": kind}) for kind in DraftKind]
        for name in ("draft", "accepted")
    ]
    assert found == [[3, 0, 20], [1, 0, 15]]
