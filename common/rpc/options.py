"""Limits and keepalive of every gRPC server and channel, in one place so that both ends agree."""

from __future__ import annotations

from typing import Final

Options = list[tuple[str, int]]

# A prompt of a million tokens is 4 MB; an inventory comes in chunks of 256 KiB.
MAX_MESSAGE_BYTES: Final = 16 << 20
KEEPALIVE_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
# A burst of new streams waits here instead of being refused; gRPC's own default loses some at a thousand at once.
MAX_PENDING_REQUESTS: Final = 16_384

_COMMON: Final[Options] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def server_options(reuse_port: bool = False) -> Options:
    """Return the options of a server. With `reuse_port` several processes share one port (SO_REUSEPORT)."""
    return [
        *_COMMON,
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.server.max_pending_requests", MAX_PENDING_REQUESTS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_REQUESTS),
        # Half of what clients send, so that a jittery clock never counts as abuse.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ]


def channel_options() -> Options:
    """Return the options of a channel. Reconnects are quick but paced; Quire itself retries what is safe."""
    return [
        *_COMMON,
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Channels to one address do not share a connection: a stream of tokens never waits behind another's.
        ("grpc.use_local_subchannel_pool", 1),
    ]
