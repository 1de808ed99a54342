"""What a screen of the suite knows at one moment: status and loads of routers, pools of the manager, ended requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc

from cli.views.status import role_of
from cli.why.pages import Lister
from common.contracts.types import DecisionKind
from common.wire.decision_codec import decision_from_proto
from quire.api.status import error_from_rpc
from quire.client import Model, Status
from quire.decision.v1 import decision_pb2
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from router.observe.diagnosis.outcome import Outcome, outcome_of
from router.observe.pool_words import disk_problems, disk_words, held_words, host_words, pages_words

_PATIENCE_S: Final = 5.0


# What the KV manager says of its ledgers, through a router's admin plane.
async def pools_of(channel: grpc.aio.Channel) -> tuple[dict[str, kvmanager_pb2.Pool], str]:
    """Return the pool of each worker, and "" or why some are missing: a manager does not answer."""
    stub = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
    try:
        answer = await stub.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=_PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        return {}, str(error_from_rpc(error)).partition("\n")[0]
    silent = ", ".join(answer.silent_groups)
    problem = f"no answer from group {silent}" if silent else ""
    return {each.worker_id: each for each in answer.pools}, problem


def stalled(pools: dict[str, kvmanager_pb2.Pool]) -> dict[str, str]:
    """Return in words what stands still in ledgers, by worker."""
    return {worker: pool.stalled for worker, pool in pools.items() if pool.stalled}


# Seconds of ended requests that the figures are about.
WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker. Blocks are in numbers, or in pages; None where the KV manager does not say."""

    worker_id: str
    state: str
    running: int
    waiting: int
    tokens_per_s: float
    blocks: int
    in_use: int | None = None
    runway: int | None = None
    cached: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    request_id: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`ended` are the requests that ended in the last WINDOW_S seconds, oldest first.

    `managers` say in words which KV manager of a group leads, `troubles` what is wrong, and `pages` what the pages are
    where a pool counts these, `held` the blocks of each group of layers there; else both are empty. `host` are the
    blocks in host memory, by worker, and `disk` those on disk; empty where no worker has any.
    """

    clock: str
    version: str
    queued: int
    running: int
    workers: tuple[WorkerRow, ...]
    ended: tuple[Ended, ...]
    troubles: tuple[str, ...] = ()
    managers: tuple[str, ...] = ()
    pages: str = ""
    held: str = ""
    host: str = ""
    disk: str = ""


async def taken(channel: grpc.aio.Channel) -> Snapshot:
    """Ask the routers and, through them, the KV manager. Raises AioRpcError when no router answers."""
    stub, now_ns = rpc.InferenceServiceStub(channel), time.time_ns()
    status = await stub.GetStatus(pb.GetStatusRequest(), timeout=_PATIENCE_S)
    model = Model.from_proto(await stub.GetModel(pb.GetModelRequest(), timeout=_PATIENCE_S))
    loads = await stub.GetLoads(pb.GetLoadsRequest(), timeout=_PATIENCE_S)
    pools, failure = await pools_of(channel)
    since = now_ns - int(WINDOW_S * 1e9)
    asked = decision_pb2.ListDecisionsRequest(kind=DecisionKind.OUTCOME, since_unix_nano=since)
    found = await Lister(channel).newest(asked, from_manager=False)
    ended = tuple(Ended(each.request_id, outcome_of(decision_from_proto(each))) for each in found.records)
    rows = tuple(_row(each, pools.get(each.worker_id)) for each in loads.workers)
    clock = time.strftime("%H:%M:%S", time.localtime(now_ns // 1_000_000_000))
    troubles = (*_troubles(status, failure, stalled(pools), found.silent_routers), *disk_problems(pools.values()))
    managers = tuple(f"{each.address} {role_of(each)}" for each in Status.from_proto(status).managers)
    figures = (status.version, status.queued_requests, status.running_requests)
    pages = pages_words(model.identity.kv_geometry, model.identity.block_size)
    of_pools = held_words(pools.values()), host_words(pools.values()), disk_words(pools.values())
    return Snapshot(clock, *figures, rows, ended, troubles, managers, pages, *of_pools)


def _row(load: pb.WorkerLoad, pool: kvmanager_pb2.Pool | None) -> WorkerRow:
    row = (load.worker_id or load.address, load.state, load.running_sequences, load.waiting_sequences)
    if pool is None:
        return WorkerRow(*row, load.output_tokens_per_second, load.num_blocks)
    return WorkerRow(
        *row,
        load.output_tokens_per_second,
        pool.num_blocks,
        in_use=pool.in_use,
        runway=pool.leased,
        cached=pool.cached,
        free=pool.free,
    )


def _troubles(status: pb.GetStatusResponse, failure: str, stalls: Mapping[str, str], silent: int) -> list[str]:
    found = [f"the KV manager: {failure}"] if failure else []
    found += [f"the ledger of {worker} stands still: {why}" for worker, why in stalls.items()]
    if not status.redis_connected:
        found.append("Redis is not connected: the router goes by load and its own memory")
    if status.draining:
        found.append("this router is draining")
    if silent:
        found.append(f"routers that did not answer: {silent}")
    found += [f"{each.worker_id or each.address}: {each.reason}" for each in status.workers if each.reason]
    return found
