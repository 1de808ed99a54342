"""Bodies that cost much to parse, to check or to serve; each is just below the limit of bytes.

Before these limits each of them stalled the router for seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.contracts.limits import MAX_HTTP_BODY_BYTES, MAX_HTTP_SEQUENCES
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker
from tests.support.router.router_process import (
    RouterUnderAttack,
    post,
    raw_connection,
    router_under_attack,
    whole_answer,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = MAX_HTTP_BODY_BYTES - 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked() -> AsyncIterator[RouterUnderAttack]:
    async with router_under_attack(FakeWorker(automatic=True, num_blocks=4096)) as router:
        yield router


async def asked(router: RouterUnderAttack, path: str, body: bytes, *headers: str) -> bytes:
    """Return the answer to a body."""
    async with asyncio.timeout(PATIENCE_S), raw_connection(router.http_port) as (reader, writer):
        writer.write(post(path, body, "Connection: close", *headers))
        return await whole_answer(reader)


async def innocent(router: RouterUnderAttack) -> bytes:
    return await asked(router, "/v1/completions", b'{"prompt": "Lyon is", "max_tokens": 2}')


def listed(head: bytes, entry: bytes, tail: bytes) -> bytes:
    """Return a body with a list of as many entries as fit."""
    count = (SIZE - len(head) - len(tail)) // (len(entry) + 1)
    return head + b",".join([entry] * count) + tail


BODIES = {
    "strings as ids": ("/detokenize", listed(b'{"tokens":[', b'"a"', b"]}")),
    "wrong messages": ("/tokenize", listed(b'{"messages":[', b"{}", b"]}")),
    "messages": ("/tokenize", listed(b'{"messages":[', b'{"role":"user"}', b"]}")),
    "valid ids": ("/v1/completions", listed(b'{"prompt":[', b"5", b"]}")),
    "unknown ids": ("/v1/completions", listed(b'{"prompt":[', b"99999", b"]}")),
    "empty prompts": ("/v1/completions", listed(b'{"prompt":[', b'""', b"]}")),
    "stop ids": ("/v1/completions", listed(b'{"prompt":"a","stop_token_ids":[', b"5", b"]}")),
    "biases": (
        "/v1/completions",
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % each for each in range(300_000)) + b"}}",
    ),
    "fields": ("/v1/completions", b'{"prompt":"a",' + b",".join(b'"%d":1' % each for each in range(300_000)) + b"}"),
    "lists in a field": ("/v1/chat/completions", listed(b'{"messages":[],"x":[', b"[]", b"]}")),
    "levels": ("/v1/completions", b'{"prompt":"a","x":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"),
    "open levels": ("/v1/completions", b'{"prompt":"a","x":' + b'{"a":' * 800_000),
    "UTF-16": ("/v1/completions", '{"prompt":[5,5,5]}'.encode("utf-16")),
    "hidden by quotes": ("/detokenize", listed(b'{"x":"\\\\","y":"\\"","tokens":[', b'"a"', b"]}")),
}


@pytest.mark.parametrize("kind", BODIES)
async def test_a_body_that_costs_much_is_refused_unparsed(attacked: RouterUnderAttack, kind: str) -> None:
    before = attacked.rss_mib
    answer = await asked(attacked, *BODIES[kind])
    grown = attacked.rss_mib - before
    assert b'"param":"body"' in answer, answer[-500:]
    assert answer.startswith(b"HTTP/1.1 400 "), answer[:100]
    assert grown < 80, f"{grown:.0f} MiB for a body of {len(BODIES[kind][1])} bytes"
    assert b"200 OK" in await innocent(attacked)
    assert not attacked.tracebacks


async def test_a_larger_body_is_refused_by_its_length(attacked: RouterUnderAttack) -> None:
    answer = await asked(attacked, "/v1/completions", b"[" * (MAX_HTTP_BODY_BYTES + 1))
    assert answer.startswith(b"HTTP/1.1 413 "), answer[:100]
    assert b"200 OK" in await innocent(attacked)


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/tokenize", b'{"messages":[' + b",".join([b"{}"] * 5000) + b"]}", b"messages"),
        ("/v1/chat/completions", b'{"messages":[' + b",".join([b'{"role":"user"}'] * 5000) + b"]}", b"messages"),
        ("/v1/completions", b'{"prompt":"a","stop_token_ids":[' + b",".join([b"5"] * 5000) + b"]}", b"stop_token_ids"),
        ("/v1/completions", b'{"prompt":"a","structured_outputs":{"json":' + b"[" * 62 + b"]" * 62 + b"}}", b"json"),
        ("/tokenize", b'{"prompt":"' + b"a" * 600_000 + b'"}', b"prompt"),
    ],
)  # fmt: skip
async def test_lists_have_limits_of_their_own(attacked: RouterUnderAttack, path: str, body: bytes, what: bytes) -> None:
    answer = await asked(attacked, path, body)
    assert answer.startswith(b"HTTP/1.1 400 "), answer[:100]
    assert what in answer
    assert not attacked.tracebacks


async def test_a_body_of_a_thousand_prompts_starves_nobody(attacked: RouterUnderAttack) -> None:
    submitted = len(attacked.worker.submits)
    attacked.worker.automatic = False
    thousand = listed(b'{"prompt":[', b'"a"', b"]}")[: 4 * 1000 + 10] + b'"a"]}'
    attackers = [asyncio.create_task(asked(attacked, "/v1/completions", thousand)) for _ in range(2)]
    try:
        answers = await asyncio.wait_for(asyncio.gather(*attackers), PATIENCE_S)
        assert all(each.startswith(b"HTTP/1.1 400 ") for each in answers), answers
        assert len(attacked.worker.submits) == submitted
    finally:
        attacked.worker.automatic = True
    assert b"200 OK" in await innocent(attacked)


async def test_prompts_times_n_are_bounded(attacked: RouterUnderAttack) -> None:
    before = len(attacked.worker.submits)
    prompts = b",".join([b'"a"'] * (MAX_HTTP_SEQUENCES // 4))
    answer = await asked(attacked, "/v1/completions", b'{"n":5,"max_tokens":1,"prompt":[' + prompts + b"]}")
    assert b"expected at most 128 sequences in one body" in answer
    assert len(attacked.worker.submits) == before
    answer = await asked(attacked, "/v1/completions", b'{"n":4,"max_tokens":1,"prompt":[' + prompts + b"]}")
    assert b"200 OK" in answer, answer[:1000]
