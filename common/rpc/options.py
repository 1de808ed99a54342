"""Limits and keepalive of every gRPC server; the limits that a channel shares come from `quire/api/channel.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.contracts.limits import CALLS_PER_CONNECTION, MAX_PUBLIC_MESSAGE_BYTES
from quire.api.channel import (
    CLIENT_KEEPALIVE_TIMEOUT_MS,
    COMMON_OPTIONS,
    KEEPALIVE_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_MESSAGE_BYTES,
    PING_TIMEOUT_MS,
    Options,
)

# A burst of new streams waits here instead of being refused; gRPC's own default loses some at a thousand at once.
MAX_PENDING_REQUESTS: Final = 16_384


@dataclass(frozen=True, slots=True)
class Callers:
    """Limits of a server for its callers: bytes of a message, and milliseconds in which no packet passes.

    `still_ms`: milliseconds for which a caller's process may stand still. `measured`: gRPC measures the path, and fits
    to it how much may be on its way. `most_calls`: at once on one connection; None: any number.

    A caller is `foreign` if anybody may be one: then little of what it sends is read at a time, so that what a
    connection sends in excess stays with its sender.
    """

    most_bytes: int = MAX_MESSAGE_BYTES
    silence_ms: int = KEEPALIVE_TIMEOUT_MS
    still_ms: int = PING_TIMEOUT_MS
    measured: bool = False
    most_calls: int | None = None
    foreign: bool = False


SERVICES: Final = Callers()
# When a router ends a silent connection, the client's requests end too. So both ends wait longer.
# A client that is stopped for a while costs what a slow reader costs.
CLIENTS: Final = Callers(
    MAX_PUBLIC_MESSAGE_BYTES,
    CLIENT_KEEPALIVE_TIMEOUT_MS,
    still_ms=60_000,
    measured=True,
    most_calls=CALLS_PER_CONNECTION,
    foreign=True,
)
# Of both ends between services. gRPC would measure the path by a ping at nearly each message, and wake up threads. A
# megabyte on its way fills a path of 100 ms with 10 MB/s: more than prompts, tokens and reports ever are.
UNMEASURED: Final[Options] = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 20)]


# Of a connection that anybody may open. gRPC would read all that has come, gigabytes of frames that it then skips.
# Calls that wait to be handled have up to 120 KB each, those included that their clients have reset. A client keeps no
# headers in the router: a reference of one byte to a kept one would stand for kilobytes.
_FOREIGN: Final = {
    "grpc.http2.hpack_table_size.decoder": 0,
    "grpc.server.max_pending_requests": MAX_PENDING_REQUESTS // 4,
    "grpc.server.max_pending_requests_hard_limit": MAX_PENDING_REQUESTS // 2,
    "grpc.experimental.tcp_max_read_chunk_size": 16 << 10,
    "grpc.experimental.tcp_max_read_buffer_size": 16 << 10,
}


def server_options(reuse_port: bool = False, callers: Callers = SERVICES) -> Options:
    """Return the options of a server.

    With `reuse_port` several processes share one port (SO_REUSEPORT).
    """
    own = {
        "grpc.server.max_pending_requests": MAX_PENDING_REQUESTS,
        "grpc.server.max_pending_requests_hard_limit": 2 * MAX_PENDING_REQUESTS,
        "grpc.max_receive_message_length": callers.most_bytes,
        "grpc.keepalive_timeout_ms": callers.silence_ms,
        "grpc.http2.ping_timeout_ms": callers.still_ms,
    }
    if callers.foreign:
        own |= _FOREIGN
    if callers.most_calls is not None:
        own["grpc.max_concurrent_streams"] = callers.most_calls
    return [
        *(dict(COMMON_OPTIONS) | own).items(),
        *(() if callers.measured else UNMEASURED),
        ("grpc.so_reuseport", int(reuse_port)),
        # Half of the clients' interval, so that a jittery clock never counts as abuse.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ]
