"""The threads for texts: turns of tenants, clients that go away, and what may wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from common.contracts.errors import Overloaded
from common.contracts.limits import SHORT_TEXT_BYTES
from router.answers.text.encoder import Encoder, works_for
from router.tenants.tenancy import Tenant
from tests.support.turns import until_blocked
from tests.support.waiting import until

MOST = SHORT_TEXT_BYTES


class Held:
    """An encoder whose short thread is busy until `free` is called, and what it did since."""

    def __init__(self) -> None:
        self.encoder, self.order = Encoder(MOST), list[str]()
        self._busy, self._gate = threading.Event(), threading.Event()
        self.holding: asyncio.Task[bool] | None = None

    async def hold(self) -> None:
        def wait() -> bool:
            self._busy.set()
            return self._gate.wait(60)

        self.holding = asyncio.create_task(self.encoder.run(1, wait))
        await until(self._busy.is_set)

    def free(self) -> None:
        self._gate.set()

    def start(self, tenant: str, name: str, size: int = 1, weight: float = 1.0) -> asyncio.Task[str]:
        """Send a piece of work in a task of the tenant's."""

        def work() -> str:
            self.order.append(name)
            return name

        async def call() -> str:
            works_for(Tenant(tenant, weight))
            return await self.encoder.run(size, work)

        return asyncio.create_task(call())


@pytest_asyncio.fixture
async def held() -> AsyncIterator[Held]:
    found = Held()
    await found.hold()
    yield found
    found.free()
    found.encoder.close()


async def test_a_tenant_that_sends_much_keeps_no_other_one_waiting(held: Held) -> None:
    many = [held.start("red", f"red {number}", 100) for number in range(20)]
    await until_blocked(*many)
    other = held.start("blue", "blue", 5_000)
    await until_blocked(other)
    held.free()
    assert await asyncio.gather(*many, other) == [*(f"red {number}" for number in range(20)), "blue"]
    assert held.order == ["red 0", "blue", *(f"red {number}" for number in range(1, 20))]


async def test_a_tenant_of_twice_the_weight_gets_twice_the_bytes(held: Held) -> None:
    sent = [held.start("red", "r", 100, weight=2.0) for _ in range(6)] + [
        held.start("blue", "b", 100) for _ in range(3)
    ]
    await until_blocked(*sent)
    held.free()
    await asyncio.gather(*sent)
    assert "".join(held.order) == "rbrbrrbrr"


async def test_work_of_a_client_that_goes_away_is_not_done(held: Held) -> None:
    gone, stays = held.start("red", "gone", MOST - 1), held.start("blue", "stays")
    await until_blocked(gone, stays)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    later = held.start("red", "later", MOST)  # nothing of the tenant waits any more
    await until_blocked(later)
    held.free()
    await asyncio.gather(stays, later)
    assert held.order == ["stays", "later"]


async def test_what_a_tenant_may_have_waiting_is_bounded_in_bytes_and_the_others_have_room(held: Held) -> None:
    waiting = [held.start("red", "red", MOST // 8) for _ in range(8)]
    await until_blocked(*waiting)
    words = r"tenant red\.waiting_texts: texts of 65536 bytes wait to be read, and 1 more are sent; at most 65536 may"
    with pytest.raises(Overloaded, match=words) as caught:
        await held.start("red", "refused", 1)
    assert caught.value.retry_after_s == 1.0
    other = held.start("blue", "blue", MOST)
    await until_blocked(other)
    held.free()
    await asyncio.gather(other, *waiting)
    assert await held.start("red", "red again", MOST) == "red again"


async def test_a_piece_above_the_bound_is_done_where_nothing_of_its_tenant_waits(held: Held) -> None:
    held.free()
    assert await held.start("red", "large", 2 * MOST) == "large"


async def test_a_text_that_takes_long_holds_up_no_short_one() -> None:
    encoder, begun, gate = Encoder(MOST), threading.Event(), threading.Event()

    def long() -> bool:
        begun.set()
        return gate.wait(60)

    running = asyncio.create_task(encoder.run(SHORT_TEXT_BYTES + 1, long))
    try:
        await until(begun.is_set)
        assert await encoder.run(SHORT_TEXT_BYTES, lambda: "short") == "short"
        assert not running.done()
    finally:
        gate.set()
    assert await running
    encoder.close()


async def test_an_error_of_the_work_goes_to_who_waits_for_it(held: Held) -> None:
    class Panic(BaseException):
        """As Rust's panics are: no Exception."""

    def fail(error: BaseException) -> Callable[[], None]:
        def work() -> None:
            raise error

        return work

    held.free()
    for error in (ValueError("wrong"), Panic("panic")):
        with pytest.raises(type(error), match=str(error)):
            await held.encoder.run(1, fail(error))
    assert await held.encoder.run(1, lambda: 5) == 5


async def test_an_encoder_that_is_closed_leaves_nobody_waiting(held: Held) -> None:
    waiting = [held.start("red", "red"), held.start("blue", "blue")]
    await until_blocked(*waiting)
    held.encoder.close()
    for task in waiting:
        with pytest.raises(asyncio.CancelledError):
            await task
    assert held.order == []
