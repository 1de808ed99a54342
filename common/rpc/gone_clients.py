"""Calls whose client is gone, a moment before gRPC cancels them: what a handler still sends fails.

A client goes whenever it likes, and its deadline may pass as the handler ends. So that is not an error of a service.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from common.rpc.grpc_internals import LOG, is_failed_batch

_GRPC_LOG: Final = logging.getLogger(LOG)
# How the text begins for a batch that gRPC took, but whose call ended first. Other batches are bugs.
_CALL_ENDED: Final = 'Failed "execute_batch"'


def client_gone() -> asyncio.CancelledError:
    """Return what a handler raises where gRPC could not send, an `aio.InternalError`."""
    return asyncio.CancelledError("the client went away")


def log_no_gone_clients() -> None:
    """Keep gRPC from logging that it could not send the last message of a call, or its status.

    gRPC sends those itself after the handler. It ignores such a failure, unless the failure comes before the news that
    the client is gone.
    """
    _GRPC_LOG.addFilter(_is_no_gone_client)


def _is_no_gone_client(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not (is_failed_batch(error) and str(error).startswith(_CALL_ENDED))
