"""For each alert: figures at which it fires, and figures nearby at which it does not; in promtool's notation.

A sample every 15 s unless a case says otherwise: `3x40` is 3 for ten minutes, `0+5x40` a counter that grows by 5 each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

Series = Mapping[str, str]

UP: Final[Series] = {f'up{{job="{job}", instance="a"}}': "1x400" for job in ("router", "kvmanager", "gpuworker")}
_WORKER: Final = 'job="kvmanager", worker="w"'


@dataclass(frozen=True, slots=True)
class Case:
    """`fires` and `quiet` are laid over the healthy `UP`; a series of "" is taken away. Both are judged `at` a time."""

    alert: str
    fires: Series
    quiet: Series
    at: str = "25m"
    # Between two samples, and two evaluations of the rules.
    every: str = "15s"


def _down(alert: str, job: str) -> tuple[Case, Case]:
    series = f'up{{job="{job}", instance="a"}}'
    one_lost_scrape = {series: "1x10 0 1x400"}
    return Case(alert, {series: "1x10 0x400"}, one_lost_scrape, "6m"), Case(alert, {series: ""}, {}, "6m")


def _histogram(name: str, labels: str, **buckets: str) -> Series:
    return {f'{name}_bucket{{{labels}, le="{le.replace("_", ".")}"}}': values for le, values in buckets.items()}


def _requests(reason: str, failed: str) -> Series:
    return {
        'quire:requests_total{job="router"}': "0+100x400",
        f'quire:request_failure_total{{job="router", reason="{reason}"}}': failed,
    }


def _first_tokens(quick: str) -> Series:
    name = "quire:time_to_first_token_seconds"
    return {f'{name}_bucket{{job="router", le="2.5"}}': quick, f'{name}_count{{job="router"}}': "0+100x400"}


def _preempted(taken: str) -> Series:
    return {
        f"quire:num_preemptions_total{{{_WORKER}}}": taken,
        f"quire:admissions_total{{{_WORKER}}}": "0+100x400",
    }


def _lost_on_disk(lost: str, loaded: str) -> Series:
    return {f"quire:kv_disk_lost_total{{{_WORKER}}}": lost, f"quire:kv_disk_loaded_total{{{_WORKER}}}": loaded}


def _hits(found: str) -> Series:
    up = dict.fromkeys(UP, "1x800")
    return {
        **up,
        f"quire:prefix_cache_queries_total{{{_WORKER}}}": "0+100x800",
        f"quire:prefix_cache_hits_total{{{_WORKER}}}": found,
    }


def _level(name: str, fires: str, quiet: str, alert: str, at: str = "25m") -> Case:
    return Case(alert, {name: fires}, {name: quiet}, at)


def _lookups(failed: str) -> Series:
    name = "quire:prefix_lookups_total"
    return {
        f'{name}{{job="router", outcome="answered"}}': "0+99x400",
        f'{name}{{job="router", outcome="failed"}}': failed,
    }


_GAPS = ("quire:inter_token_latency_seconds", 'job="router"')
_LEASES = ("quire:lease_round_trip_seconds", 'job="gpuworker", instance="a"')
_LAGS = ("quire:event_loop_lag_seconds", 'job="router", instance="a"')
_FIRST, _SECOND = 'up{job="kvmanager", instance="a"}', 'up{job="kvmanager", instance="b"}'
_LEADS = 'quire:manager_leads{{job="kvmanager", instance="{}"}}'
_FILES = 'job="router", instance="a"'

CASES: Final = (
    *_down("QuireRouterDown", "router"),
    *_down("QuireManagerDown", "kvmanager"),
    # One of two: no page. Both: no ticket for each.
    Case("QuireStandbyDown", {_SECOND: "1x10 0x400"}, {_SECOND: "1x10 0 1x400"}, "6m"),
    Case("QuireStandbyDown", {_SECOND: "1x400", _FIRST: "1x10 0x400"}, {_SECOND: "1x400"}, "6m"),
    Case("QuireManagerDown", {_SECOND: "1x10 0x400", _FIRST: "1x10 0x400"}, {_SECOND: "1x400"}, "6m"),
    *_down("QuireWorkerDown", "gpuworker"),
    _level('quire:workers_connected{job="router"}', "1x8 0x40", "1x8 0x6 1x40", "QuireNoWorkers", "5m"),
    _level('quire:manager_attached{job="gpuworker"}', "1x8 0x40", "1x8 0 0 1x40", "QuireWorkerDetached", "4m"),
    _level('quire:step_age_seconds{job="gpuworker"}', "0x8 15+15x40", "29x40", "QuireStepStuck", "5m"),
    _level('quire:manager_epoch{job="kvmanager"}', "1x8 0 2x4 0 3x80", "1x8 0 2x80", "QuireManagersCompete", "10m"),
    _level('quire:manager_leads{job="kvmanager"}', "1x8 0x40", "1x8 0 1x40", "QuireNoLeader", "4m"),
    # The leader is gone for good, and the standby leads or does not.
    Case(
        "QuireNoLeader",
        {_LEADS.format("a"): "1x8 stale", _LEADS.format("b"): "0x100"},
        {_LEADS.format("a"): "1x8 stale", _LEADS.format("b"): "0x8 1x100"},
        "5m",
    ),
    _level(
        'quire:manager_takeovers_total{job="kvmanager"}', "0x8 2x4 4x80", "0x8 1x80", "QuireManagerTakeovers", "10m"
    ),
    _level('quire:index_elsewhere{job="kvmanager"}', "0x8 1x40", "0x8 1 0x40", "QuireWorkerInTwoGroups", "5m"),
    _level('quire:quarantines_total{job="kvmanager"}', "0x20 1x80", "1x100", "QuireProtocolBroken", "10m"),
    Case(
        "QuireFilesRunOut",
        {f"process_open_fds{{{_FILES}}}": "810x80", f"process_max_fds{{{_FILES}}}": "1000x80"},
        {f"process_open_fds{{{_FILES}}}": "790x80", f"process_max_fds{{{_FILES}}}": "1000x80"},
        "10m",
    ),
    _level('quire:stalled{job="router"}', "0x8 1x40", "0x8 1 1 0x40", "QuireStalled", "5m"),
    Case(
        "QuireLoopLags",
        _histogram(*_LAGS, **{"0_25": "0+98x400", "0_5": "0+100x400", "+Inf": "0+100x400"}),
        _histogram(*_LAGS, **{"0_25": "0+99.5x400", "0_5": "0+100x400", "+Inf": "0+100x400"}),
    ),
    Case("QuireRefusing", _requests("OVERLOADED", "0+3x400"), _requests("OVERLOADED", "0+1x400")),
    Case("QuireRefusing", _requests("UNAVAILABLE", "0+3x400"), _requests("RATE_LIMITED", "0+99x400")),
    Case("QuireRefusing", _requests("ENGINE_FAILURE", "0+3x400"), _requests("CANCELLED", "0+50x400")),
    Case("QuireSlowFirstToken", _first_tokens("0+94x400"), _first_tokens("0+96x400")),
    Case(
        "QuireSlowTokens",
        _histogram(*_GAPS, **{"0_1": "0+90x400", "0_25": "0+98x400", "0_5": "0+100x400", "+Inf": "0+100x400"}),
        _histogram(*_GAPS, **{"0_1": "0+90x400", "0_25": "0+99.5x400", "0_5": "0+100x400", "+Inf": "0+100x400"}),
    ),
    # Of the second the queue is empty once in a while.
    _level(
        'quire:num_requests_waiting{job="router"}', "3x400", "9x15 0 9x15 0 9x15 0 9x400", "QuireQueueStands", "14m"
    ),
    _level(f"quire:kv_cache_usage_perc{{{_WORKER}}}", "0.96x400", "0.94x400", "QuireBlocksShort"),
    Case("QuirePreempting", _preempted("0+11x400"), _preempted("0+9x400")),
    # A day of 80 %, then an hour and a half of less.
    Case("QuireHitRateFell", _hits("0+80x720 57600+35x80"), _hits("0+80x720 57600+45x80"), "25h30m", "2m"),
    _level('quire:index_reachable{job="kvmanager"}', "0x400", "1x400", "QuireIndexUnreachable"),
    _level('quire:prefix_index_connected{job="router"}', "0x400", "1x400", "QuireIndexUnreachable"),
    Case("QuireLookupsFail", _lookups("0+25x400"), _lookups("0+24x400")),
    _level('quire:index_queue{job="kvmanager"}', "20001x400", "20000x400", "QuireIndexBehind"),
    Case(
        "QuireLeasesSlow",
        _histogram(*_LEASES, **{"0_05": "0+98x400", "0_1": "0+100x400", "+Inf": "0+100x400"}),
        _histogram(*_LEASES, **{"0_05": "0+99.5x400", "0_1": "0+100x400", "+Inf": "0+100x400"}),
    ),
    _level('quire:disk_usable{job="gpuworker"}', "0x400", "1x400", "QuireDiskGivenUp"),
    Case("QuireDiskLosesBlocks", _lost_on_disk("0+5x400", "0+99x400"), _lost_on_disk("0+5x400", "0+101x400")),
    Case("QuireDiskLosesBlocks", _lost_on_disk("0+0.5x400", "0x400"), _lost_on_disk("0x40 20x400", "0x400")),
    _level('quire:migrations_total{job="router"}', "0+1x400", "0x40 12x400", "QuireSequencesMove", "15m"),
)
