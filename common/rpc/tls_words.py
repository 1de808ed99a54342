"""What a failed TLS handshake says, in words for the one who called. Pure: texts of gRPC and OpenSSL in, words out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

# A part of the text, and what it means of the server at an address. OpenSSL's words come before gRPC's.
_MEANINGS: Final[tuple[tuple[str, Callable[[str], str]], ...]] = (
    ("certificate has expired", lambda at: f"the certificate of what answers at {at} has expired; renew it"),
    ("not yet valid", lambda at: f"the certificate of what answers at {at} is not valid yet; set the clocks"),
    (
        "hostname verification check failed",
        lambda at: f"the certificate of what answers at {at} names another host or service",
    ),
    ("hostname mismatch", lambda at: f"the certificate of what answers at {at} names another host"),
    ("ip address mismatch", lambda at: f"the certificate of what answers at {at} names another host"),
    (
        "certificate_verify_failed",
        lambda at: f"the certificate of what answers at {at} is not signed by the CA that is trusted here",
    ),
    ("wrong_version_number", lambda at: f"what answers at {at} speaks no TLS, and this command asked for it"),
    ("unknown ca", lambda at: f"what answers at {at} does not trust the CA of the certificate that was shown to it"),
)
# A connection that ends before anything came over it, in words of gRPC and httpx. One that broke later is not a sign.
_CLOSED: Final = (("failed to connect", "socket closed"), ("server disconnected without sending",))


def tls_problem(text: str, address: str, with_tls: bool) -> str:
    """Return what is wrong between both ends of a connection that failed with a text; "" where it is not TLS.

    A server that gets plain text, or a certificate that it does not take, closes the connection without a word.
    """
    lowered = text.lower().replace("wrong version number", "wrong_version_number")
    lowered = lowered.replace("certificate verify failed", "certificate_verify_failed")
    for part, meaning in _MEANINGS:
        if part in lowered:
            return meaning(address)
    if not any(all(part in lowered for part in parts) for parts in _CLOSED):
        return ""
    refused = "does not take the certificate that was shown to it" if with_tls else "asks for TLS"
    return f"what answers at {address} closes the connection: most likely it {refused}"
