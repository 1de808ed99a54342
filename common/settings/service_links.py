"""Variables that Kubernetes sets in every pod for each Service of the namespace, and that are not options of Quire.

A Service `quire-router` makes QUIRE_ROUTER_PORT=tcp://10.0.0.1:8000, QUIRE_ROUTER_SERVICE_HOST and others.
`enableServiceLinks: false` in the pod leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

_URL: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
_LINK: Final = re.compile(r"(?P<service>.+)_PORT(_\d+_(TCP|UDP|SCTP))?")
_REST: Final = r"_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"


def service_links(environ: Mapping[str, str], prefix: str) -> frozenset[str]:
    """Return the names, of those with a prefix, that Kubernetes has set for Services."""
    ours = [name for name in environ if name.startswith(prefix)]
    urls = {name for name in ours if _URL.fullmatch(environ[name]) and _LINK.fullmatch(name)}
    rest = re.compile(f"({'|'.join(map(re.escape, set(_services(urls))))})({_REST})") if urls else None
    return frozenset(urls | {name for name in ours if rest is not None and rest.fullmatch(name)})


def _services(urls: set[str]) -> Iterator[str]:
    for name in urls:
        if found := _LINK.fullmatch(name):
            yield found["service"]


def in_words(links: frozenset[str]) -> str:
    """Return one line about the variables that were passed over."""
    shown = ", ".join(sorted(links)[:3])
    more = f" and {len(links) - 3} more" if len(links) > 3 else ""
    return (
        f"variables of Kubernetes' service links are not options of Quire and are ignored: {shown}{more} "
        "(enableServiceLinks: false in the pod leaves them out)"
    )
