"""Channel options of both clients, and the default deadline."""

from __future__ import annotations

from typing import Final, TypeAlias

from quire.api.channel import Options, channel_options

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

DEFAULT_TIMEOUT: Final = 300.0


def client_options() -> Options:
    """Return the options of a client's channel: it sends keepalive pings during calls only.

    Proxies close connections that ping without a call.
    """
    return list((dict(channel_options()) | {"grpc.keepalive_permit_without_calls": 0}).items())
