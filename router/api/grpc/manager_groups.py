"""The leaders of the groups of KV managers that share a pool, asked all at once.

Each group owns some of the workers and leads its own life: one that does not answer is left out of an answer, by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from grpc import aio

from common.contracts.errors import Cancelled, NotFound, QuireError, Unavailable
from common.group.leader_watch import LeaderWatch, ManagerState
from common.group.names import Resolve, resolved
from common.process.supervised import Supervisor
from common.rpc.server import Dial
from quire.api.status import error_from_rpc

_UNHEARD: Final = "has not answered since the router's start"

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stream(Protocol[T_co]):
    """A call whose responses are streamed."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    def cancel(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Answers(Generic[T]):
    """What the groups answered, and what kept the others from it, by their names.

    Of managers that were `unheard` since the router's start the group is not known; its name is their address.
    """

    found: tuple[T, ...]
    failures: dict[str, QuireError]
    groups: tuple[str, ...]
    """Of each answer in `found`."""
    unheard: frozenset[str] = frozenset()
    asked: Mapping[str, str] = field(default_factory=dict)
    """The address that was asked, by group."""
    heard: frozenset[str] = frozenset()
    """The addresses that had answered by then, since the router's start."""

    @property
    def failed(self) -> dict[str, QuireError]:
        """The failures of groups that are known."""
        return {name: error for name, error in self.failures.items() if name not in self.unheard}

    @property
    def silent(self) -> list[str]:
        return [f"{each} (it {_UNHEARD})" if each in self.unheard else each for each in sorted(self.failures)]


class ManagerGroups:
    """`names` are HOST:PORT of every manager of every group; of each group the one that leads is asked."""

    def __init__(self, names: Sequence[str], dial: Dial, resolve: Resolve = resolved) -> None:
        self._dial = dial
        self._watch = LeaderWatch(names, dial, resolve=resolve)

    def start(self, supervisor: Supervisor) -> None:
        """Begin to follow which managers lead; the supervisor ends that."""
        self._watch.start(supervisor)

    def managers(self) -> tuple[ManagerState, ...]:
        """Return what each manager says of itself; () where there is one alone."""
        return self._watch.managers

    def leaders(self) -> dict[str, str]:
        """Return an address for each group; one at least."""
        return self._watch.leaders() or {"": self._watch.addresses[0]}

    def unheard(self) -> list[str]:
        """Return the addresses of managers that have not answered since the router's start."""
        return self._watch.unheard()

    def heard(self) -> frozenset[str]:
        """Return the addresses of managers that have answered since the router's start."""
        return self._watch.heard()

    def known(self) -> frozenset[str]:
        """Return the groups of which a manager has answered."""
        return frozenset(self._watch.leaders())

    def group_at(self, address: str) -> str:
        """Return the group of a manager that was heard."""
        return self._watch.group_at(address)

    async def ask(self, group: str, ask: Callable[[aio.Channel], Awaitable[object]]) -> QuireError | None:
        """Ask the leader of one group; return what kept it from the answer."""
        answer = await self.answer_of(group, ask)
        return answer if isinstance(answer, QuireError) else None

    async def answer_of(self, group: str, ask: Callable[[aio.Channel], Awaitable[T]]) -> T | QuireError:
        """Return what the leader of one group answers, or what kept it from that."""
        address = self._address_of(group)
        return address if isinstance(address, QuireError) else await self._answer(address, ask)

    def _address_of(self, group: str) -> str | QuireError:
        """Return where the leader of a group is asked. No other group is asked in place of one that has gone."""
        gone = Unavailable(
            f"no manager of {group_in_words(group)} is known any more; ask again when one of them is there"
        )
        return self.leaders().get(group, gone)

    async def all(self, ask: Callable[[aio.Channel], Awaitable[T]]) -> Answers[T]:
        """Ask every group. Raises the error of one if none answers; NotFound only if all others say that too.

        A group that answers NOT_FOUND has answered: what was asked for belongs to another group. A manager that was
        never heard may be all that is left of a group: it counts as a group that does not answer.
        """
        await self._watch.first_look()
        leaders, heard = self.leaders(), self.heard()
        answers = await asyncio.gather(*(self._answer(address, ask) for address in leaders.values()))
        failures = {name: each for name, each in zip(leaders, answers, strict=True) if isinstance(each, QuireError)}
        unheard = self._unheard(leaders)
        failures |= {address: Unavailable(_unheard_words(address)) for address in unheard}
        found = tuple([each for each in answers if not isinstance(each, QuireError)])
        silent = {name: error for name, error in failures.items() if not isinstance(error, NotFound)}
        if not found:
            raise next(iter((silent or failures).values()))
        groups = tuple([name for name in leaders if name not in failures])
        return Answers(found, silent, groups, unheard, leaders, heard)

    def _unheard(self, asked: dict[str, str]) -> frozenset[str]:
        """Return the addresses that were never heard, and that were not asked."""
        return frozenset(self._watch.unheard()).difference(asked.values())

    async def _answer(self, address: str, ask: Callable[[aio.Channel], Awaitable[T]]) -> T | QuireError:
        try:
            async with self._dial(address) as channel:
                return await ask(channel)
        except aio.AioRpcError as error:
            return in_words(error, address)

    async def stream(self, name: str, ask: Callable[[aio.Channel], Stream[T]]) -> AsyncGenerator[T, None]:
        """Yield what the leader of a group streams, as fast as it is read. Raises what ends the stream."""
        address = self._address_of(name)
        if isinstance(address, QuireError):
            raise address
        async with self._dial(address) as channel:
            call = ask(channel)
            try:
                async for response in call:
                    yield response
            except aio.AioRpcError as error:
                raise in_words(error, address) from None
            finally:
                call.cancel()


def _unheard_words(address: str) -> str:
    return f"the manager at {address} {_UNHEARD}; start it, or leave it out of --manager"


def group_in_words(group: str) -> str:
    return f"group {group}" if group else "the managers without a group"


def in_words(error: aio.AioRpcError, address: str) -> QuireError:
    found = error_from_rpc(error)
    if isinstance(found, Cancelled):  # not by this router: its own cancellation is not an error of the call
        return Unavailable(f"the KV manager at {address} ended the call as it stopped")
    if isinstance(found, Unavailable) and "connect" in str(found).lower():
        return Unavailable(f"no KV manager answers at {address}; start one, or name it to the router with --manager")
    return found
