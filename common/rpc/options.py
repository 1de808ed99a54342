"""Limits and keepalive of every gRPC server; the limits that a channel shares come from `quire/api/channel.py`."""

from __future__ import annotations

from typing import Final

from quire.api.channel import COMMON_OPTIONS, KEEPALIVE_MS, MAX_MESSAGE_BYTES, Options

# A burst of new streams waits here instead of being refused; gRPC's own default loses some at a thousand at once.
MAX_PENDING_REQUESTS: Final = 16_384


def server_options(reuse_port: bool = False, most_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Return the options of a server that takes messages of at most `most_bytes`.

    With `reuse_port` several processes share one port (SO_REUSEPORT).
    """
    received = "grpc.max_receive_message_length"
    return [
        *(option for option in COMMON_OPTIONS if option[0] != received),
        (received, most_bytes),
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.server.max_pending_requests", MAX_PENDING_REQUESTS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_REQUESTS),
        # Half of the clients' interval, so that a jittery clock never counts as abuse.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ]
