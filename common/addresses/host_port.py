"""HOST:PORT, with brackets around an IPv6 address: the one place that joins them."""

from __future__ import annotations


def joined_address(host: str, port: int) -> str:
    """Return HOST:PORT. The host may have brackets already, and a scope (`fe80::1%eth0`)."""
    bare = bare_host(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def bare_host(host: str) -> str:
    """Return a host without brackets, as sockets and names take it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
