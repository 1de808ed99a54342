"""Signed tokens (JWT) as credentials: the signer's public keys come from a JWKS file, the tenant from a claim.

Only signatures with a public key count (RSA, ECDSA, Ed25519): with a shared secret, who checks a token could make one.
A token must name its signer, its audience and its end. A token that ends lets its open requests go on; a key that is
taken out of the JWKS file ends them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jwt

from common.contracts.errors import FieldViolation, InvalidConfig, Unauthenticated

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
# Seconds by which the clocks of signer and router may differ.
LEEWAY_S: Final = 30
_REQUIRED: Final = ["exp", "iss", "aud"]


class TokenReader:
    """Checks tokens of one signer for one audience. `claim` is the name of the claim that has the tenant's name."""

    def __init__(self, jwks: Path, issuer: str, audience: str, claim: str) -> None:
        """Raises InvalidConfig for a file that is not a JWKS with a usable public key."""
        self._issuer, self._audience, self._claim = issuer, audience, claim
        self._keys = _read_keys(jwks)

    def read(self, token: str) -> tuple[str, str]:
        """Return the tenant's name and the credential of a token. Raises Unauthenticated with what is wrong with it."""
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
            key = self._keys.get(key_id or "")
            if key is None:
                raise Unauthenticated("the token is signed with a key that is not known here")
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                issuer=self._issuer,
                audience=self._audience,
                leeway=LEEWAY_S,
                options={"require": [*_REQUIRED, self._claim]},
            )
        except jwt.InvalidTokenError as error:
            raise Unauthenticated(f"the token is not valid: {_words(error)}") from None
        name = claims[self._claim]
        if not isinstance(name, str):
            raise Unauthenticated(f"the token's claim {self._claim} must be a string")
        return name, f"jwt {key_id}"

    def knows(self, credential: str) -> bool:
        """Return whether the key of a credential that `read` returned is still in the file."""
        return credential.removeprefix("jwt ") in self._keys


def _words(error: jwt.InvalidTokenError) -> str:
    """Return why a token is wrong, without anything that the token says."""
    known: dict[type[Exception], str] = {
        jwt.ExpiredSignatureError: "its time is over",
        jwt.ImmatureSignatureError: "its time has not begun",
        jwt.InvalidSignatureError: "its signature is wrong",
        jwt.InvalidAudienceError: "it is for another audience",
        jwt.InvalidIssuerError: "it is from another issuer",
        jwt.MissingRequiredClaimError: "a claim is missing",
    }
    return next((words for kind, words in known.items() if isinstance(error, kind)), "it is malformed")


def _read_keys(path: Path) -> dict[str, jwt.PyJWK]:
    try:
        entries = json.loads(path.read_text())["keys"]
        keys = {entry["kid"]: jwt.PyJWK(entry) for entry in entries if entry.get("kty") != "oct"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, jwt.PyJWTError) as error:
        what = f"is not a JWKS with public keys that have a kid: {type(error).__name__}: {error}"
        raise InvalidConfig(FieldViolation(str(path), what)) from None
    keys = {key_id: key for key_id, key in keys.items() if key.algorithm_name in ALGORITHMS}
    if not keys:
        raise InvalidConfig(FieldViolation(str(path), f"has no key for signatures; expected one of {ALGORITHMS}"))
    return keys
