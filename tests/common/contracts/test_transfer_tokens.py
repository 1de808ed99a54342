"""Tokens of transfers: each field is part of them, and they end with the key, the incarnation and their time."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

import pytest

from common.contracts.hashing import key_of
from common.contracts.transfer_tokens import (
    ServeKeys,
    TokenRefusal,
    TokenScope,
    drawn_pool_key,
    make_token,
    serve_key_of,
    verify_token,
)
from common.contracts.types import BlockHash

D, S, OTHER = b"d" * 16, b"s" * 16, b"o" * 16
HASHES = (BlockHash(b"a" * 16), BlockHash(b"b" * 16))
SCOPE = TokenScope("worker-d", D, S, 1_000, HASHES)
KEY = serve_key_of(b"pool", S)
TOKEN = make_token(KEY, SCOPE)


def test_a_serve_key_is_of_the_pool_and_of_one_incarnation() -> None:
    assert hmac.new(b"pool", b"quire-transfer-v1" + S, hashlib.sha256).digest() == KEY
    assert len({KEY, serve_key_of(b"pool", OTHER), serve_key_of(b"pond", S)}) == 3


def test_a_token_has_these_bytes() -> None:
    message = (
        b"quire-transfer-token-v1" + bytes.fromhex("08000000 10000000") + b"worker-d" + D + bytes.fromhex("10000000")
        + S + bytes.fromhex("e803000000000000 20000000") + hashlib.sha256(b"".join(HASHES)).digest()
    )  # fmt: skip
    assert hmac.new(KEY, message, hashlib.sha256).digest()[:16] == TOKEN
    assert verify_token([KEY], SCOPE, TOKEN, now=0.0) is None


@pytest.mark.parametrize(
    "changed",
    [
        replace(SCOPE, destination="worker-e"),
        replace(SCOPE, destination=""),
        replace(SCOPE, incarnation=OTHER),
        replace(SCOPE, source_incarnation=OTHER),
        replace(SCOPE, expires=1_001),
        replace(SCOPE, keys=HASHES[:1]),
        replace(SCOPE, keys=(*HASHES, BlockHash(b"c" * 16))),
        replace(SCOPE, keys=HASHES[::-1]),
        replace(SCOPE, keys=(HASHES[0], BlockHash(b"b" * 15 + b"c"))),
        replace(SCOPE, destination="worker-d" + D.decode(), incarnation=S, source_incarnation=b""),
    ],
)
def test_a_token_is_for_what_it_was_made_for_alone(changed: TokenScope) -> None:
    assert verify_token([KEY], changed, TOKEN, now=0.0) is TokenRefusal.FOREIGN


_ONE_BIT_OFF = [TOKEN[:at] + bytes([TOKEN[at] ^ 1]) + TOKEN[at + 1 :] for at in range(16)]


@pytest.mark.parametrize("token", [b"", TOKEN[:15], TOKEN + b"\0", bytes(16), *_ONE_BIT_OFF])
def test_any_other_token_is_refused(token: bytes) -> None:
    assert verify_token([KEY], SCOPE, token, now=0.0) is TokenRefusal.FOREIGN


def test_the_clocks_of_two_machines_may_differ_by_five_minutes() -> None:
    assert verify_token([KEY], SCOPE, TOKEN, now=1_300.0) is None
    assert verify_token([KEY], SCOPE, TOKEN, now=1_300.1) is TokenRefusal.EXPIRED


def test_a_source_without_a_key_refuses_and_says_so() -> None:
    assert verify_token([], SCOPE, TOKEN, now=0.0) is TokenRefusal.NO_KEY
    assert "no key of a manager yet" in TokenRefusal.NO_KEY.value


def test_the_last_two_keys_hold() -> None:
    keys = ServeKeys()
    keys.note_key(b"")
    assert keys.accepted_keys() == ()
    for key in (b"1", b"2", b"2", b"3"):
        keys.note_key(key)
    assert keys.accepted_keys() == (b"3", b"2")
    keys.note_key(KEY)
    assert verify_token(keys.accepted_keys(), SCOPE, TOKEN, now=0.0) is None
    keys.note_key(b"4")
    assert verify_token(keys.accepted_keys(), SCOPE, TOKEN, now=0.0) is None
    keys.note_key(b"5")
    assert verify_token(keys.accepted_keys(), SCOPE, TOKEN, now=0.0) is TokenRefusal.FOREIGN
    keys.forget_keys()
    assert keys.accepted_keys() == ()


def test_a_manager_without_a_pool_key_draws_one() -> None:
    assert drawn_pool_key(lambda count: b"r" * count) == b"r" * 32


def test_a_token_of_groups_is_for_each_group_alone() -> None:
    keys = (key_of(HASHES[0], 1), HASHES[1])
    token = make_token(KEY, replace(SCOPE, keys=keys))
    assert verify_token([KEY], replace(SCOPE, keys=keys), token, now=0.0) is None
    others = (HASHES, (key_of(HASHES[0], 2), HASHES[1]), (HASHES[0], key_of(HASHES[1], 1)))
    for other in others:
        assert verify_token([KEY], replace(SCOPE, keys=other), token, now=0.0) is TokenRefusal.FOREIGN
