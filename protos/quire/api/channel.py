"""Limits and keepalive of every gRPC channel. `common/rpc/options.py` gives servers the same ones."""

from __future__ import annotations

from typing import Final

from quire.api.proxy import PROXY_OPTION

Options = list[tuple[str, int]]

# A prompt of a million tokens is 4 MB; an inventory comes in chunks of 256 KiB.
MAX_MESSAGE_BYTES: Final = 16 << 20
KEEPALIVE_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
# Between a client and its router: longer, because a router that gives its client up ends the client's requests.
CLIENT_KEEPALIVE_TIMEOUT_MS: Final = 15_000
# For the answer to a ping. Keepalive asks whether packets arrive, which a kernel answers for a process that is stopped.
# This asks whether the process runs: gRPC answers on threads of its own, whatever Python does meanwhile.
PING_TIMEOUT_MS: Final = 10_000
# A client asks another router later than workers notice that the first one stands still (common/rpc/silence.py).
CLIENT_PING_TIMEOUT_MS: Final = 15_000

COMMON_OPTIONS: Final[Options] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
]


def channel_options() -> Options:
    """Return the options of a channel. Reconnects are quick but paced; Quire itself retries what is safe."""
    return [
        *COMMON_OPTIONS,
        (PROXY_OPTION, 0),  # a proxy that the environment names stands between no two services
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Channels to one address do not share a connection: a stream of tokens never waits behind another's.
        ("grpc.use_local_subchannel_pool", 1),
    ]
