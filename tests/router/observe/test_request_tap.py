"""Recordings of ended sequences: keyed names, bounded queues, and a bound on recordings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import Overloaded
from common.contracts.types import BlockHash
from router.observe.request_tap import MAX_WAITING, MAX_WATCHES, EndedSequence, RequestTap, Tapped
from tests.support.turns import until_blocked

A, B = BlockHash(b"a" * 16), BlockHash(b"b" * 16)


def ended(*blocks: BlockHash, arrived: float = 5.0, tenant: str = "") -> EndedSequence:
    return EndedSequence(arrived, arrived + 2.0, arrived + 1.0, 40, 8, 16, 16, blocks, "w0", tenant, 3)


async def begun(tap: RequestTap) -> tuple[AsyncGenerator[Tapped, None], asyncio.Task[Tapped]]:
    """Return a recording that runs, and its first record to come."""
    watch = tap.watch()
    first = asyncio.ensure_future(anext(watch))
    await until_blocked(first)
    return watch, first


async def test_names_are_equal_for_equal_blocks_of_one_recording_alone() -> None:
    tap = RequestTap(ManualClock(3.0))
    one, first = await begun(tap)
    other, its_first = await begun(tap)
    async with aclosing(one), aclosing(other):
        tap.ended(lambda: [ended(A, B, tenant="acme"), ended(A, tenant="acme")])
        found, again, elsewhere = await first, await anext(one), await its_first
    assert found.blocks[0] == again.blocks[0] != found.blocks[1]
    assert {*found.blocks} & {*elsewhere.blocks} == set()
    assert found.tenant == again.tenant != elsewhere.tenant
    assert "acme" not in found.tenant
    assert all(0 <= name < 1 << 48 for name in found.blocks)
    assert (found.arrived, found.lost) == (2.0, 0)


async def test_what_a_slow_reader_misses_is_counted() -> None:
    tap = RequestTap(ManualClock())
    watch, first = await begun(tap)
    async with aclosing(watch):
        tap.ended(lambda: [ended(arrived=float(number)) for number in range(MAX_WAITING + 3)])
        assert ((await first).arrived, (await anext(watch)).arrived) == (3.0, 4.0)
        tap.ended(lambda: [ended(arrived=0.0)] * 2)
        tap.ended(lambda: [ended(arrived=0.0)])
        found = await anext(watch)
    assert (found.arrived, found.lost) == (6.0, 1)


async def test_recordings_are_bounded_and_an_ended_one_makes_room() -> None:
    tap = RequestTap(ManualClock())
    running = [await begun(tap) for _ in range(MAX_WATCHES)]
    with pytest.raises(Overloaded, match="4 recordings run already; end one of them"):
        await anext(tap.watch())
    for watch, first in running:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await watch.aclose()
    watch, first = await begun(tap)
    tap.ended(lambda: [ended()])
    assert (await first).sequence.worker_id == "w0"
    await watch.aclose()


def test_while_nothing_records_no_sequence_is_described() -> None:
    def never() -> list[EndedSequence]:
        raise AssertionError("described for nothing")

    RequestTap(ManualClock()).ended(never)
