"""How both clients connect: limits and keepalive of the channel, and the default deadline."""

from __future__ import annotations

from typing import Final, TypeAlias

from quire.api.channel import Options, channel_options

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

DEFAULT_TIMEOUT: Final = 300.0


def client_options() -> Options:
    """Return the options of a client's channel: a call that waits for tokens pings its server, an idle client nobody.

    Proxies end connections that ping without a call.
    """
    return list((dict(channel_options()) | {"grpc.keepalive_permit_without_calls": 0}).items())
