"""Gathers the ends of requests in a span of time and in the one before it, and says which records are missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import grpc

from cli.why.pages import Lister, Records
from cli.why.source import Source, source_of
from common.contracts.types import DecisionKind
from common.wire.decision_codec import decision_from_proto
from quire.decision.v1 import decision_pb2 as pb
from router.observe.diagnosis.change import Change, hit_rate_change, latency_change
from router.observe.diagnosis.outcome import Outcome, outcome_of
from router.observe.diagnosis.words import count, duration

DEFAULT_SPAN_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Ends:
    """The outcomes of two spans of `seconds` each, and in words what is missing of them."""

    seconds: float
    before: tuple[Outcome, ...]
    after: tuple[Outcome, ...]
    missing: tuple[str, ...] = ()


async def ends_of(channel: Source | grpc.aio.Channel, seconds: float, tenant: str, now_ns: int) -> Ends:
    """Return the ends of the requests of a tenant ("" for all) in the last two spans."""
    length = int(seconds * 1e9)
    asked = pb.ListDecisionsRequest(
        kind=DecisionKind.OUTCOME, tenant=tenant, since_unix_nano=now_ns - 2 * length, until_unix_nano=now_ns
    )
    source = source_of(channel)
    lister = Lister(source)
    found = await lister.newest(asked, from_manager=False)
    asked.kind = DecisionKind.REJECTION
    refused = await lister.newest(asked, from_manager=False)
    ends = sorted_ends(found, refused, seconds, now_ns)
    return replace(ends, missing=(*ends.missing, *(f"records of {each}" for each in source.missing())))


def sorted_ends(found: Records, refused: Records, seconds: float, now_ns: int) -> Ends:
    """Return the outcomes by span, and what is not among them."""
    middle = now_ns - int(seconds * 1e9)
    outcomes = [outcome_of(decision_from_proto(each)) for each in found.records]
    before = tuple(each for each in outcomes if each.time_ns < middle)
    after = tuple(each for each in outcomes if each.time_ns >= middle)
    return Ends(seconds, before, after, (*_missing(found, seconds, now_ns), *_refused(refused, middle)))


def _missing(found: Records, seconds: float, now_ns: int) -> Iterator[str]:
    kept = (now_ns - found.complete_since_ns) / 1e9
    if kept < 2 * seconds:
        of_before = max(0.0, kept - seconds)
        what = f"records go back {duration(kept)} ({found.bound}, or a router began then)"
        yield f"{what}: the span before has {duration(of_before)} of its {duration(seconds)}"
    if found.silent_routers:
        yield f"{count(found.silent_routers, 'router')} did not answer: its requests are not counted"


def _refused(refused: Records, middle: int) -> Iterator[str]:
    after = sum(each.time_unix_nano >= middle for each in refused.records)
    before = len(refused.records) - after
    if before or after:
        yield f"requests refused at their arrival are not counted: {before:,} before, {after:,} now"


def changes(ends: Ends, hit_rate: bool, latency: bool) -> tuple[Change, ...]:
    """Return the changes that are asked for, each with what is missing."""
    found: list[Change] = []
    if hit_rate:
        found.append(hit_rate_change(ends.before, ends.after))
    if latency:
        found.append(latency_change(ends.before, ends.after))
    return tuple(replace(each, missing=(*ends.missing, *_uncounted(ends, each))) for each in found)


def _uncounted(ends: Ends, change: Change) -> Sequence[str]:
    before, after = (
        len(span) - counted.requests for span, counted in ((ends.before, change.before), (ends.after, change.after))
    )
    if not before and not after:
        return ()
    why = "had no first token" if change.measure == "first_token" else "got no blocks"
    return (f"requests that {why} are not counted: {before:,} before, {after:,} now",)
