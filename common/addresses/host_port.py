"""HOST:PORT, with brackets around an IPv6 address: the one place that joins them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

SERVER_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
_SENTINEL: Final = {"redis+sentinel": False, "rediss+sentinel": True}
_SERVER: Final = ("redis", "rediss")
_CLUSTER: Final = ("redis+cluster", "rediss+cluster", "redis-cluster", "rediss-cluster")
_QUERY: Final = frozenset({"sentinel_username", "sentinel_password"})
EXPECTED: Final = (
    'expected redis://HOST:PORT[/DB], rediss://..., unix://PATH, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, or "" '
    "for none"
)


# URLs of Redis: those of one server, as redis-py has them, and those of Sentinels, which name the master.
#     redis://[USER:PASSWORD@]HOST[:PORT][/DB]        one server; rediss:// with TLS, unix://PATH through a socket
#     redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/SERVICE[/DB][?sentinel_password=...]
# USER and PASSWORD are those of the server; `sentinel_username` and `sentinel_password` those of the Sentinels.
@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The Sentinels, as (host, port), and the service whose master they name."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    db: int = 0
    tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)


def is_sentinel_url(url: str) -> bool:
    return url.partition("://")[0] in _SENTINEL


def is_tls_url(url: str) -> bool:
    return url.startswith("rediss")


def checked_redis_url(url: str) -> str:
    """Return a URL as it is; "" means no Redis. Raises ValueError, without a password, for one that cannot be used."""
    scheme, separator, rest = url.partition("://")
    if not url or (scheme == "unix" and separator):
        return url
    if scheme in _CLUSTER and separator:
        raise ValueError(f"names a Redis Cluster, whose keys lie on several servers; {EXPECTED}")
    if is_sentinel_url(url):
        sentinel_url(url)
        return url
    if scheme not in _SERVER or not separator:
        raise ValueError(EXPECTED)
    if "," in rest.rpartition("@")[2].partition("/")[0]:
        raise ValueError("names several servers; expected one, or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE")
    return url


def sentinel_url(url: str) -> SentinelUrl:
    """Return the parts of a URL of Sentinels. Raises ValueError, in words without a password."""
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    service, _, db = parts.path.strip("/").partition("/")
    query = parse_qs(parts.query)
    if not service:
        raise ValueError("names no service; expected redis+sentinel://HOST:PORT,HOST:PORT/SERVICE")
    if db and not (db.isascii() and db.isdecimal()):
        raise ValueError("has no number as its database; expected redis+sentinel://HOST:PORT/SERVICE/DB")
    if unknown := sorted(query.keys() - _QUERY):
        raise ValueError(f"has {', '.join(unknown)} after the ?; expected {' or '.join(sorted(_QUERY))}")
    return SentinelUrl(
        sentinels=tuple(_host_and_port(each, SENTINEL_PORT) for each in hosts.split(",")),
        service=unquote(service),
        db=int(db or 0),
        tls=_SENTINEL[parts.scheme],
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_username=query.get("sentinel_username", [None])[0],
        sentinel_password=query.get("sentinel_password", [None])[0],
    )


def redis_addresses(url: str) -> tuple[tuple[str, int], ...]:
    """Return (host, port) of the server or of the Sentinels; () for a socket file. Raises ValueError."""
    if is_sentinel_url(url):
        return sentinel_url(url).sentinels
    parts = urlsplit(url)
    return () if parts.scheme == "unix" else ((parts.hostname or "localhost", parts.port or SERVER_PORT),)


def without_login(url: str) -> str:
    """Return a URL without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _host_and_port(address: str, default: int) -> tuple[str, int]:
    parts = urlsplit(f"//{address}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if not parts.hostname or port == 0:
        raise ValueError(f"has {address!r} among the Sentinels; expected HOST:PORT, with [..] around an IPv6 address")
    return parts.hostname, port or default


def joined_address(host: str, port: int) -> str:
    """Return HOST:PORT. The host may have brackets already, and a scope (`fe80::1%eth0`)."""
    bare = bare_host(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def bare_host(host: str) -> str:
    """Return a host without brackets, as sockets and names take it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
