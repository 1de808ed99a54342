"""Operators' calls that the KV manager answers; the router's admin plane passes them on.

A reset of the prefix cache is the manager's decision, and the events of the caches are the manager's. Operators then
need one address, the router's. Each call opens its channel: they are rare, and a renewed certificate counts at once.
Where several groups of managers share the pool, all of them are asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import grpc
from grpc import aio

from common.contracts.errors import InvalidRequest, Unavailable
from common.decisions.merged import merged
from common.decisions.pages import bounds_of
from common.decisions.ring import listed
from common.group.names import Resolve, resolved
from common.process.supervised import Supervisor
from common.rpc.server import Dial
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from router.api.grpc.group_streams import DecisionFollower, EventFollower, Follower, Merged
from router.api.grpc.late_groups import Ask, LateGroups, Recheck
from router.api.grpc.manager_groups import Answers, ManagerGroups, group_in_words
from router.api.shared.call_context import Context

MANAGER: Final = "quire.kvmanager.v1.KvManagerService"
# The manager waits for workers and Redis, up to 15 s.
_PATIENCE_S: Final = 30.0
# Ends of one pin in two groups differ by their clocks, and by the wait of the call.
_CLOCKS_APART_S: Final = 300.0
# Of a pin that is over when a group answers at last. The group ends it at once.
_LEAST_PIN_S: Final = 0.001
_LIST_PATIENCE_S: Final = 3.0

T = TypeVar("T")


class ManagerCalls:
    """`names` are HOST:PORT of the KV manager, or of the managers of all groups: of each the leader is called."""

    def __init__(self, names: Sequence[str], dial: Dial, resolve: Resolve = resolved) -> None:
        self._groups = ManagerGroups(names, dial, resolve)
        self._late = LateGroups(self._groups)
        self.managers = self._groups.managers

    def start(self, supervisor: Supervisor) -> None:
        """Begin to follow the managers; the supervisor ends that."""
        self._groups.start(supervisor)
        supervisor.run_task("changes for managers that come late", self._late.run)

    async def _change(
        self,
        what: str,
        ask: Callable[[aio.Channel], Awaitable[T]],
        later: Callable[[aio.Channel], Awaitable[T]] | None = None,
        removes_from: float = math.inf,
        recheck: Recheck | None = None,
    ) -> Answers[T]:
        """Ask every group for a change, and `later` those that answer for the first time then. Raises Unavailable.

        `recheck` asks a group that has the change what the others are to be asked by then.
        """
        async with self._late.changing(what):
            self._late.make_room(what)
            answers = await self._groups.all(ask)
            self._late.keep_change(what, later or ask, answers, removes_from, recheck)
            return answers

    async def reset(
        self, request: pb.ResetPrefixCacheRequest, context: Context | None = None
    ) -> pb.ResetPrefixCacheResponse:
        """Reset the prefix cache of all workers. Raises Unavailable when a group does not answer; the others did it."""
        answers = await self._change(
            "reset of the prefix cache",
            lambda channel: rpc.KvManagerServiceStub(channel).ResetPrefixCache(request, timeout=_PATIENCE_S),
        )
        for name, failure in answers.failed.items():
            raise Unavailable(f"the other groups were reset, and group {name} was not: {failure}")
        return pb.ResetPrefixCacheResponse(
            dropped_blocks=sum(each.dropped_blocks for each in answers.found),
            workers=[worker for each in answers.found for worker in each.workers],
            index_current=all(each.index_current for each in answers.found),
            unheard_managers=sorted(answers.unheard),
        )

    async def decisions(self, request: decision_pb2.ListDecisionsRequest) -> decision_pb2.ListDecisionsResponse:
        """Return the decision records of all groups. Raises Unavailable when none answers."""
        (answer,) = await self.all_decisions([request])
        return answer

    async def all_decisions(
        self, requests: Sequence[decision_pb2.ListDecisionsRequest]
    ) -> Sequence[decision_pb2.ListDecisionsResponse]:
        """Return the records of all groups for several calls, in their order. Raises Unavailable when none answers."""

        async def ask(channel: aio.Channel) -> list[decision_pb2.ListDecisionsResponse]:
            stub = decision_pb2_grpc.DecisionServiceStub(channel)
            calls = [stub.ListDecisions(each, timeout=_LIST_PATIENCE_S) for each in requests]
            return [await call for call in calls]

        answers = await self._groups.all(ask)
        return [
            _whole(request, [each[place] for each in answers.found], answers.silent)
            for place, request in enumerate(requests)
        ]

    async def watch(
        self, request: decision_pb2.WatchDecisionsRequest
    ) -> AsyncGenerator[decision_pb2.WatchDecisionsResponse, None]:
        """Pass on the decisions of all groups, as fast as the watcher reads them."""
        async with aclosing(self._stream(DecisionFollower(self._groups, request))) as responses:
            async for response in responses:
                yield response

    async def pools(self, request: pb.GetPoolRequest, context: Context | None = None) -> pb.GetPoolResponse:
        """Return what the blocks of each worker are used for. Raises Unavailable when no group answers."""
        answers = await self._groups.all(
            lambda channel: rpc.KvManagerServiceStub(channel).GetPool(request, timeout=_LIST_PATIENCE_S)
        )
        return pb.GetPoolResponse(
            epoch=max(each.epoch for each in answers.found),
            pools=sorted((pool for each in answers.found for pool in each.pools), key=lambda pool: pool.worker_id),
            silent_groups=answers.silent,
        )

    async def block_map(self, request: pb.GetBlockMapRequest) -> pb.GetBlockMapResponse:
        """Return how a page of a worker's blocks is used. Raises Unavailable when no group answers, and NotFound."""
        answers = await self._groups.all(
            lambda channel: rpc.KvManagerServiceStub(channel).GetBlockMap(request, timeout=_LIST_PATIENCE_S)
        )
        return answers.found[0]

    async def block(self, request: pb.GetBlockRequest) -> pb.GetBlockResponse:
        """Return everything about one block. Raises Unavailable when no group answers, and NotFound."""
        answers = await self._groups.all(
            lambda channel: rpc.KvManagerServiceStub(channel).GetBlock(request, timeout=_LIST_PATIENCE_S)
        )
        return answers.found[0]

    async def prefetch(self, request: pb.PrefetchPrefixRequest) -> pb.PrefetchPrefixResponse:
        """Let a prefix come to a worker. Raises Unavailable when no group answers, NotFound, and InvalidRequest."""
        answers = await self._groups.all(
            lambda channel: rpc.KvManagerServiceStub(channel).PrefetchPrefix(request, timeout=_LIST_PATIENCE_S)
        )
        return answers.found[0]

    async def block_tables(self, request: pb.GetBlockTableRequest) -> pb.GetBlockTableResponse:
        """Return block tables of live sequences. Raises Unavailable when no group answers, and NotFound."""
        answers = await self._groups.all(
            lambda channel: rpc.KvManagerServiceStub(channel).GetBlockTable(request, timeout=_LIST_PATIENCE_S)
        )
        return pb.GetBlockTableResponse(tables=[table for each in answers.found for table in each.tables])

    async def pin(self, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
        """Pin a prefix. Raises Unavailable when a group does not answer, and InvalidRequest beyond a bound.

        The other groups keep the prefix then: it may have replaced one of its name there, so it is not unpinned.
        """
        ends = None if not request.HasField("duration") else time.monotonic() + request.duration

        async def later(channel: aio.Channel) -> pb.PinPrefixResponse:
            asked = pb.PinPrefixRequest()
            asked.CopyFrom(request)
            if ends is not None:
                asked.duration = max(_LEAST_PIN_S, ends - time.monotonic())
            return await rpc.KvManagerServiceStub(channel).PinPrefix(asked, timeout=_LIST_PATIENCE_S)

        async def recheck(channel: aio.Channel, answer: pb.PinPrefixResponse) -> Ask | None:
            """A group that lacks the pin shows that it was removed or is over; one with another has a later one."""
            kept = await _pin_at(channel, request.name)
            if kept is None:
                return _unpin(request.name)
            return later if _content(kept) == _content(answer.pin) else None

        answers = await self._change(
            _pin_named(request.name),
            lambda channel: rpc.KvManagerServiceStub(channel).PinPrefix(request, timeout=_LIST_PATIENCE_S),
            later,
            math.inf if ends is None else ends,
            recheck,
        )
        for name, failure in answers.failed.items():
            if isinstance(failure, InvalidRequest):
                raise _kept_elsewhere(failure, name, answers.groups, request.name)
        for name, failure in answers.failed.items():
            raise Unavailable(f"the other groups keep the prefix, and group {name} does not: {failure}; pin it again")
        return pb.PinPrefixResponse(
            pin=merged_pins(each.pin for each in answers.found)[0],
            durable=all(each.durable for each in answers.found),
            unheard_managers=sorted(answers.unheard),
        )

    async def pins(self, request: pb.ListPinsRequest, context: Context | None = None) -> pb.ListPinsResponse:
        """Return the pins of all groups. Raises Unavailable when none answers."""
        answers = await self._groups.all(
            lambda channel: rpc.KvManagerServiceStub(channel).ListPins(request, timeout=_LIST_PATIENCE_S)
        )
        return pb.ListPinsResponse(
            pins=with_other_groups(dict(zip(answers.groups, (each.pins for each in answers.found), strict=True))),
            durable=all(each.durable for each in answers.found),
            silent_groups=answers.silent,
        )

    async def unpin(self, request: pb.UnpinPrefixRequest, context: Context | None = None) -> pb.UnpinPrefixResponse:
        """Remove a pin. Raises Unavailable when a group does not answer, and NotFound."""
        unpin = _unpin(request.name)

        async def recheck(channel: aio.Channel, _: pb.UnpinPrefixResponse) -> Ask | None:
            """A group that has a pin of this name got that later."""
            return unpin if await _pin_at(channel, request.name) is None else None

        answers = await self._change(_pin_named(request.name), unpin, removes_from=time.monotonic(), recheck=recheck)
        for name, failure in answers.failed.items():
            raise Unavailable(f"the other groups removed the pin, and group {name} did not: {failure}")
        return pb.UnpinPrefixResponse(unheard_managers=sorted(answers.unheard))

    async def reset_page(self) -> object:
        """Return the answer to a reset over HTTP."""
        answer = await self.reset(pb.ResetPrefixCacheRequest())
        workers = [
            {
                "worker_id": each.worker_id,
                "dropped_blocks": each.dropped_blocks,
                "blocks_in_use": each.blocks_in_use,
                "confirmed": each.confirmed,
            }
            for each in answer.workers
        ]
        return {
            "dropped_blocks": answer.dropped_blocks,
            "workers": workers,
            "index_current": answer.index_current,
            "unheard_managers": list(answer.unheard_managers),
        }

    async def events(
        self, request: pb.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[pb.SubscribeKvEventsResponse]:
        """Pass on the events of all groups, as fast as the subscriber reads them: each manager bounds what waits."""
        async with aclosing(self._stream(EventFollower(self._groups, request))) as responses:
            async for response in responses:
                yield response

    def _stream(self, follower: Follower[T]) -> AsyncGenerator[T, None]:
        """Return the stream of the only manager, which ends as that one does, or those of all groups in one."""
        names = self._groups.leaders()
        if len(names) == 1 and not self._groups.managers():
            return follower.open(*names)
        return Merged(lambda: tuple(self._groups.leaders()), follower).messages()

    def add_to(self, server: aio.Server) -> None:
        """Serve some methods; gRPC answers UNIMPLEMENTED to the others of the service."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "ResetPrefixCache": grpc.unary_unary_rpc_method_handler(
                self.reset, pb.ResetPrefixCacheRequest.FromString, pb.ResetPrefixCacheResponse.SerializeToString
            ),
            "GetPool": grpc.unary_unary_rpc_method_handler(
                self.pools, pb.GetPoolRequest.FromString, pb.GetPoolResponse.SerializeToString
            ),
            "ListPins": grpc.unary_unary_rpc_method_handler(
                self.pins, pb.ListPinsRequest.FromString, pb.ListPinsResponse.SerializeToString
            ),
            "UnpinPrefix": grpc.unary_unary_rpc_method_handler(
                self.unpin, pb.UnpinPrefixRequest.FromString, pb.UnpinPrefixResponse.SerializeToString
            ),
            "SubscribeKvEvents": grpc.unary_stream_rpc_method_handler(
                self.events, pb.SubscribeKvEventsRequest.FromString, pb.SubscribeKvEventsResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(MANAGER, handlers),))


def _whole(
    request: decision_pb2.ListDecisionsRequest, answers: Sequence[decision_pb2.ListDecisionsResponse], silent: list[str]
) -> decision_pb2.ListDecisionsResponse:
    """Return one answer for those of all groups."""
    alone = len(answers) == 1
    answer = answers[0] if alone else merged(answers, bounds_of(request.page_token), listed(request.limit))
    answer.silent_groups.extend(silent)
    return answer


def _pin_named(name: str) -> str:
    """Return what a pin and its end are kept as for groups that answer late: the last of them counts."""
    return f"pin {name}"


def _unpin(name: str) -> Callable[[aio.Channel], Awaitable[pb.UnpinPrefixResponse]]:
    request = pb.UnpinPrefixRequest(name=name)
    return lambda channel: rpc.KvManagerServiceStub(channel).UnpinPrefix(request, timeout=_LIST_PATIENCE_S)


async def _pin_at(channel: aio.Channel, name: str) -> pb.PinnedPrefix | None:
    """Return what a group keeps under a name."""
    answer = await rpc.KvManagerServiceStub(channel).ListPins(pb.ListPinsRequest(), timeout=_LIST_PATIENCE_S)
    return next((each for each in answer.pins if each.name == name), None)


def _kept_elsewhere(failure: InvalidRequest, refusing: str, keeping: Sequence[str], pin: str) -> InvalidRequest:
    """Return the refusal of one group with the groups that keep the pin all the same."""
    others = ", ".join(map(group_in_words, keeping))
    kept = f"that is {group_in_words(refusing)}; kept by {others}: `quire unpin {pin}` ends that"
    return InvalidRequest(*(replace(each, description=f"{each.description}; {kept}") for each in failure.violations))


def with_other_groups(pins: Mapping[str, Iterable[pb.PinnedPrefix]]) -> list[pb.PinnedPrefix]:
    """Return the pins of all groups as `merged_pins` does, each with the groups that lack it or keep another one."""
    of_group = {group: {pin.name: pin for pin in each} for group, each in pins.items()}
    contents = {group: {name: _content(pin) for name, pin in known.items()} for group, known in of_group.items()}
    found = merged_pins(pin for each in of_group.values() for pin in each.values())
    for pin in found:
        content = _content(pin)
        for group, known in sorted(contents.items()):
            if pin.name not in known:
                pin.missing_groups.append(group)
            elif not _alike(known[pin.name], content):
                pin.differing_groups.append(group)
    return found


@dataclass(frozen=True, slots=True)
class _Content:
    """What a pin keeps, and for how long."""

    prefix: tuple[str, int, int, bytes]
    expires: float | None


def _content(pin: pb.PinnedPrefix) -> _Content:
    prefix = pin.tenant, pin.num_tokens, pin.num_blocks, pin.last_block_hash
    return _Content(prefix, pin.expires if pin.HasField("expires") else None)


def _alike(one: _Content, other: _Content) -> bool:
    """Return whether one call may have made both: each group adds the duration to a clock of its own."""
    if one.prefix != other.prefix or one.expires is None or other.expires is None:
        return one == other
    return abs(one.expires - other.expires) <= _CLOCKS_APART_S


def merged_pins(pins: Iterable[pb.PinnedPrefix]) -> list[pb.PinnedPrefix]:
    """Return each pin once, in the order of the first group that has it, with the workers of all groups."""
    found = dict[str, pb.PinnedPrefix]()
    for pin in pins:
        known = found.setdefault(pin.name, pin)
        if known is not pin:
            known.workers.extend(pin.workers)
    return list(found.values())
