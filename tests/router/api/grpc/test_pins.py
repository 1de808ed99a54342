"""Pins at the router: which tokens and hashes a prompt gives, what the KV manager is asked, where it is computed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from cli.demo_model import CHECKPOINT
from common.contracts.clock import SystemClock
from common.contracts.errors import InvalidRequest, Overloaded, QuotaViolation, Unavailable
from common.contracts.hashing import KEY_BYTES, block_digests, root_digest
from common.contracts.types import KvGeometry, PoolIdentity
from quire.inference.v1 import inference_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2
from router.answers.text.checkpoint import read_checkpoint
from router.answers.text.checkpoint_text import CheckpointText
from router.api.grpc.manager_calls import ManagerCalls
from router.api.grpc.pins import PinParts, Pins
from router.contracts.events import ValidatedRequest
from router.contracts.identity import UNKNOWN_GEOMETRY
from router.requests.validate import Validator
from router.tenants.tenancy import Caller, Tenant
from tests.support.router.fake_frontend import ScriptedFrontend, admitted, finished, tokens
from tests.support.router.known_router import KnownRouter

IDENTITY = PoolIdentity("m" * 32, "t" * 32, 16, KvGeometry(2, 1, 8, 8, "float32"))
TEXT = CheckpointText.load(CHECKPOINT, read_checkpoint(CHECKPOINT, None).max_model_len, None)
RULES = "You answer questions about the rules of a small town, and nothing else. " * 6


class Manager:
    """Takes every pin, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[kvmanager_pb2.PinPrefixRequest] = []

    async def pin(self, request: kvmanager_pb2.PinPrefixRequest) -> kvmanager_pb2.PinPrefixResponse:
        self.asked.append(request)
        blocks = len(request.block_hashes) // KEY_BYTES
        pin = kvmanager_pb2.PinnedPrefix(name=request.name, num_tokens=request.num_tokens, num_blocks=blocks)
        return kvmanager_pb2.PinPrefixResponse(pin=pin, durable=True)


class Desk:
    """Pins over a real tokenizer and validator, with a manager and workers that a test looks at."""

    def __init__(self, workers: int = 3, identity: PoolIdentity = IDENTITY) -> None:
        self.manager, self.frontend = Manager(), ScriptedFrontend()
        self.frontend.script = self.script
        self.requests: list[ValidatedRequest] = []
        validator = Validator(TEXT, read_checkpoint(CHECKPOINT, None))
        parts = PinParts(
            cast("Any", self.frontend), validator, TEXT, self, KnownRouter(identity, workers), SystemClock()
        )
        self.pins = Pins(parts, cast("ManagerCalls", self.manager))
        self.full = False

    @staticmethod
    def named(tenant: str) -> Caller:
        return Caller(Tenant(tenant, cache_domain=f"domain of {tenant}".encode(), shared_domains=(("open", b"all"),)))

    def script(self, request: ValidatedRequest) -> list[Any]:
        self.requests.append(request)
        if self.full and len(self.requests) == 2:
            return [Overloaded(QuotaViolation("router.queue", "9 requests wait; at most 9"), 1.0)]
        first = replace(admitted(request), worker_id=f"worker-{len(self.requests) - 1}")
        return [first, tokens("x"), finished(1)]


def chat(*messages: tuple[str, str]) -> pb.Prompt:
    return pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for role, text in messages]))


def hashes_of(prompt: list[int], domain: bytes) -> bytes:
    root = root_digest(IDENTITY.model_fingerprint, IDENTITY.tokenizer_fingerprint, IDENTITY.block_size, domain)
    return b"".join(digest[:KEY_BYTES] for digest in block_digests(root, prompt, IDENTITY.block_size))


async def test_a_chat_is_pinned_up_to_where_the_next_message_begins() -> None:
    desk = Desk()
    answer = await desk.pins.pin(pb.PinRequest(prompt=chat(("system", RULES)), tenant="red"))
    (asked,) = desk.manager.asked
    for question in ("What is rule one?", "Am I allowed to?", "0"):
        later = chat(("system", RULES), ("user", question))
        later.chat.add_generation_prompt = True
        whole = hashes_of(await TEXT.encode(later), b"domain of red")
        assert whole.startswith(asked.block_hashes)
        assert len(whole) - len(asked.block_hashes) <= 2 * KEY_BYTES, "all but what the question is in"
    assert (answer.num_blocks, answer.durable) == (len(asked.block_hashes) // KEY_BYTES, True)
    assert not asked.HasField("duration")


async def test_the_domain_is_that_of_tenant_salt_and_shared_domain() -> None:
    desk = Desk()
    ids = pb.Prompt(token_ids=pb.TokenIds(ids=list(range(100, 150))))
    salted, shared = pb.CacheOptions(salt="s"), pb.CacheOptions(shared_domain="open")
    for tenant, cache in (("red", None), ("blue", None), ("red", salted), ("red", shared)):
        await desk.pins.pin(pb.PinRequest(prompt=ids, tenant=tenant, cache=cache))
    hashes = [each.block_hashes for each in desk.manager.asked]
    assert len(set(hashes)) == 4
    assert hashes[0] == hashes_of(list(range(100, 150)), b"domain of red")
    assert hashes[3] == hashes_of(list(range(100, 150)), b"all")


async def test_a_pin_without_a_name_has_the_same_each_time() -> None:
    desk = Desk()
    for text in (RULES, RULES, RULES + "More."):
        await desk.pins.pin(pb.PinRequest(prompt=pb.Prompt(text=text * 2), duration=5.0))
    first, second, other = (each.name for each in desk.manager.asked)
    assert first == second != other
    assert [each.duration for each in desk.manager.asked] == [5.0] * 3


async def test_a_prompt_is_computed_on_other_workers_behind_all_requests() -> None:
    desk = Desk(workers=2)
    answer = await desk.pins.pin(pb.PinRequest(prompt=pb.Prompt(text=RULES), compute_on=5))
    assert (list(answer.computed_on), answer.not_computed) == (["worker-0", "worker-1"], "there are 2 workers")
    assert [each.avoids for each in desk.requests] == [frozenset(), frozenset({"worker-0"})]
    assert {(each.priority, each.sampling.max_tokens) for each in desk.requests} == {(-100, 1)}


async def test_what_could_not_be_computed_is_said_and_the_pin_stays() -> None:
    desk = Desk()
    desk.full = True
    answer = await desk.pins.pin(pb.PinRequest(prompt=pb.Prompt(text=RULES), compute_on=3))
    assert list(answer.computed_on) == ["worker-0"]
    assert answer.not_computed.startswith("router.queue: 9 requests wait")


async def test_one_pin_does_not_wait_for_the_computing_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    computing, go_on = asyncio.Event(), asyncio.Event()

    async def held(prompt: ValidatedRequest, done: frozenset[str]) -> str:
        computing.set()
        await go_on.wait()
        return "worker-0"

    monkeypatch.setattr(desk.pins, "_computed_by_another", held)
    async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(desk.pins.pin(pb.PinRequest(prompt=pb.Prompt(text=RULES), compute_on=1)))
        await computing.wait()
        assert (await desk.pins.pin(pb.PinRequest(prompt=pb.Prompt(text=RULES)))).durable
        go_on.set()
    assert list(first.result().computed_on) == ["worker-0"]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.PinRequest(), "prompt"),
        (pb.PinRequest(prompt=pb.Prompt(text="Hi")), "prompt"),
        (pb.PinRequest(prompt=pb.Prompt(text=RULES), cache=pb.CacheOptions(no_cache=True)), "cache.no_cache"),
        (pb.PinRequest(prompt=pb.Prompt(text=RULES), cache=pb.CacheOptions(salt="s" * 300)), "cache.salt"),
        (pb.PinRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[-1] * 20))), "prompt.token_ids.ids"),
    ],
    ids=["none", "short", "not cached", "salt", "ids"],
)
async def test_a_wrong_request_names_the_field_and_pins_nothing(request_: pb.PinRequest, field: str) -> None:
    desk = Desk()
    with pytest.raises(InvalidRequest) as caught:
        await desk.pins.pin(request_)
    assert caught.value.violations[0].field.startswith(field)
    assert desk.manager.asked == []


async def test_before_any_worker_the_pool_is_unknown() -> None:
    unknown = PoolIdentity("m" * 32, "t" * 32, 16, UNKNOWN_GEOMETRY)
    with pytest.raises(Unavailable, match="no worker has been there yet"):
        await Desk(identity=unknown).pins.pin(pb.PinRequest(prompt=pb.Prompt(text=RULES)))
