"""What the KV manager says of its ledgers, through a router's admin plane."""

from __future__ import annotations

from typing import Final

import grpc

from quire.api.status import error_from_rpc
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

_PATIENCE_S: Final = 5.0


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
