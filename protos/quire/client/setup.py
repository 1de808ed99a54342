"""Channel options, credentials and metadata of both clients, and the default deadline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, TypeAlias

import grpc

from quire.api.channel import CLIENT_KEEPALIVE_TIMEOUT_MS, CLIENT_PING_TIMEOUT_MS, Options, channel_options
from quire.api.proxy import PROXY_OPTION, is_this_machine

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

DEFAULT_TIMEOUT: Final = 300.0
CA_VARIABLE: Final = "QUIRE_CA"
API_KEY_VARIABLE: Final = "QUIRE_API_KEY"
_AUTHORIZATION: Final = "authorization"


def client_options(address: str) -> Options:
    """Return the options of a client's channel to an address: it sends keepalive pings during calls only.

    A proxy of the environment leads to other machines alone.
    Proxies close connections that ping without a call. Silence is borne for as long as a router bears it, and a router
    that stands still for as long as its workers need to notice that.
    """
    own = {
        "grpc.keepalive_permit_without_calls": 0,
        "grpc.keepalive_timeout_ms": CLIENT_KEEPALIVE_TIMEOUT_MS,
        "grpc.http2.ping_timeout_ms": CLIENT_PING_TIMEOUT_MS,
        PROXY_OPTION: int(not is_this_machine(address)),
    }
    return list((dict(channel_options()) | own).items())


def credentials_of(ca: str | Path | None) -> grpc.ChannelCredentials | None:
    """Return credentials that trust the CA in a PEM file; None for plain text.

    None means the file in QUIRE_CA, if it is set; "" means plain text. Raises OSError when the file cannot be read.
    """
    path = os.environ.get(CA_VARIABLE, "") if ca is None else ca
    return grpc.ssl_channel_credentials(Path(path).read_bytes()) if path else None


def metadata_of(metadata: Metadata, api_key: str | None) -> Metadata:
    """Return the metadata of every call, with the key unless `metadata` has an authorization of its own.

    None means the key in QUIRE_API_KEY, if it is set; "" means none. Raises ValueError for what no header may have.
    """
    key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    if not key or any(name.lower() == _AUTHORIZATION for name, _ in metadata):
        return metadata
    if not key.isascii() or not key.isprintable():
        raise ValueError("the API key has characters that no header may have; expected printable ASCII")
    return (*metadata, (_AUTHORIZATION, f"Bearer {key}"))
