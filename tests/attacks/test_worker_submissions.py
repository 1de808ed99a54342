"""Submissions that a worker must refuse for themselves alone: tokens under hashes of others, and hostile numbers.

The worker is a real process on a tiny checkpoint. Who attacks has a stream of its own, as a router would.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from common.contracts.hashing import little_endian_int32
from common.contracts.types import PoolIdentity
from common.rpc.server import open_channel
from common.wire.identity_codec import identity_from_proto
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types
from tests.support.checkpoints import checkpoint, hf_greedy
from tests.support.gpuworker.worker_harness import RouterEnd, chain_of
from tests.support.gpuworker.worker_process import until, worker_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

VICTIM = [10 + 7 * n % 200 for n in range(33)]  # two full blocks
FOREIGN = [11 + 5 * n % 200 for n in range(33)]
OUTPUT = 12
DOMAIN = b"the victim's cache domain"


@dataclass
class Worker:
    """A running worker process: its address, and the identity of its pool."""

    address: str
    identity: PoolIdentity

    @asynccontextmanager
    async def router(self) -> AsyncIterator[RouterEnd]:
        async with open_channel(self.address) as channel:
            router = RouterEnd(rpc.GpuWorkerServiceStub(channel).Stream())
            await router.send(pb.StreamRequest(hello=pb.Hello(router_id="r")))
            await router.until("hello")
            yield router

    def submit(self, handle: int, prompt: Sequence[int], hashed: Sequence[int] | None = None) -> pb.StreamRequest:
        """Return a greedy sequence of 12 tokens; its hashes are those of `hashed`, or of the prompt."""
        hashes, last = chain_of(prompt if hashed is None else hashed, self.identity, DOMAIN)
        sampling = types.SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        submit = pb.Submit(
            handle=handle,
            prompt_token_ids=little_endian_int32(prompt),
            block_hashes=hashes,
            parent_digest=last,
            cache_domain=DOMAIN,
            sampling=sampling,
        )
        return pb.StreamRequest(submit=submit)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[Worker]:
    async with worker_process("", "--dtype", "float32") as process:
        address = (await until(process, "READY"))[-1].split()[1]
        async with open_channel(address) as channel:
            info = (await rpc.GpuWorkerServiceStub(channel).GetWorker(pb.GetWorkerRequest())).info
        yield Worker(address, identity_from_proto(info.identity))


async def refused(router: RouterEnd) -> tuple[int, int, list[str]]:
    """Return the handle, the code and the fields of the next refusal; fail if a sequence ends before it."""
    while (message := await router.read()) is not None and not router.finished:
        if message.HasField("refused"):
            status, detail = status_pb2.Status.FromString(message.refused.status), error_details_pb2.BadRequest()
            found = [each for one in status.details if one.Unpack(detail) for each in detail.field_violations]
            return message.refused.handle, status.code, [each.field for each in found]
    raise AssertionError(f"no refusal came: {router.finished or 'the stream ended'}")


async def test_foreign_tokens_under_the_hashes_of_a_victim_do_not_change_its_answer(worker: Worker) -> None:
    async with worker.router() as attacker, worker.router() as victim:
        await attacker.send(worker.submit(1, FOREIGN, hashed=VICTIM))
        refusal = asyncio.create_task(refused(attacker))
        await asyncio.wait([refusal])
        await victim.send(worker.submit(1, VICTIM))
        await victim.until_finished(1)
        assert victim.tokens[1] == hf_greedy(checkpoint("llama"), VICTIM, OUTPUT)
        assert refusal.result() == (1, grpc.StatusCode.INVALID_ARGUMENT.value[0], ["block_hashes"])
        assert victim.admitted[1].cached_tokens == 0


async def test_a_chain_of_another_domain_is_refused(worker: Worker) -> None:
    async with worker.router() as attacker:
        message = worker.submit(1, VICTIM)
        message.submit.cache_domain = b"another"
        await attacker.send(message)
        assert (await refused(attacker))[2] == ["block_hashes"]


async def test_the_digest_of_a_victim_is_no_root(worker: Worker) -> None:
    """Tokens that continue the victim's chain as if nothing came before them would fill its next block wrongly."""
    async with worker.router() as attacker:
        message = worker.submit(1, FOREIGN[:5])
        message.submit.parent_digest = chain_of(VICTIM, worker.identity, DOMAIN)[1]
        await attacker.send(message)
        assert (await refused(attacker))[2] == ["parent_digest"]


MOST = 2**31 - 1
HOSTILE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # what: (fields of the sampling, fields of the submit, the field that is named)
    "min_tokens above max_tokens": ({"min_tokens": MOST}, {}, "sampling.min_tokens"),
    "negative min_tokens": ({"min_tokens": -MOST}, {}, "sampling.min_tokens"),
    "negative max_tokens": ({"max_tokens": -1}, {}, "sampling.max_tokens"),
    "temperature is not a number": ({"temperature": math.nan}, {}, "sampling.temperature"),
    "infinite temperature": ({"temperature": math.inf}, {}, "sampling.temperature"),
    "top_p 0": ({"top_p": 0.0}, {}, "sampling.top_p"),
    "negative top_k": ({"top_k": -MOST}, {}, "sampling.top_k"),
    "min_p above 1": ({"min_p": 1.5}, {}, "sampling.min_p"),
    "repetition_penalty is not a number": ({"repetition_penalty": math.nan}, {}, "sampling.repetition_penalty"),
    "infinite penalty": ({"presence_penalty": -math.inf}, {}, "sampling.presence_penalty"),
    "penalty out of range": ({"frequency_penalty": 1e38}, {}, "sampling.frequency_penalty"),
    "negative logprobs": ({"logprobs": -1}, {}, "sampling.logprobs"),
    "logprobs of the whole vocabulary": ({"logprobs": MOST}, {}, "sampling.logprobs"),
    "bias of an unknown id": ({"logit_bias": {-1: 1.0}}, {}, "sampling.logit_bias"),
    "bias that is not a number": ({"logit_bias": {3: math.nan}}, {}, "sampling.logit_bias"),
    "stop token outside of the vocabulary": ({"stop_token_ids": [MOST]}, {}, "sampling.stop_token_ids"),
    "too many stop tokens": ({"stop_token_ids": [1] * 20_000}, {}, "sampling.stop_token_ids"),
    "priority": ({}, {"priority": -(2**31)}, "priority"),
    "a deadline that is not a number": ({}, {"timeout_seconds": math.nan}, "timeout_seconds"),
    "more output than tokens": ({}, {"output_tokens_before": 2**32 - 1}, "prompt_token_ids"),
    "a prompt as long as the context": ({}, {"prompt_token_ids": bytes(4 * 64)}, "prompt_token_ids"),
    "a token outside of the vocabulary": ({}, {"prompt_token_ids": b"\xff" * 12}, "prompt_token_ids"),
    "a line break in the id": ({}, {"request_id": "r\nforged"}, "request_id"),
    "a long domain": ({}, {"cache_domain": bytes(33)}, "cache_domain"),
    "a large constraint": ({}, {"regex": "a" * 70_000}, "regex"),
}


async def test_hostile_numbers_end_nothing_but_their_own_request(worker: Worker) -> None:
    async with worker.router() as attacker, worker.router() as innocent:
        await innocent.send(*(worker.submit(handle, VICTIM[handle:]) for handle in range(1, 5)))
        for handle, (sampling, fields, _) in enumerate(HOSTILE.values(), start=1):
            message = worker.submit(handle, FOREIGN[:9])
            message.submit.sampling.MergeFrom(types.SamplingParams(**sampling))
            message.submit.MergeFrom(pb.Submit(**fields))
            await attacker.send(message)
        code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
        for handle, (what, (*_, field)) in enumerate(HOSTILE.items(), start=1):
            found = await refused(attacker)
            assert found[:2] == (handle, code), what
            assert field in found[2], what
        await innocent.until_finished(1, 2, 3, 4)
        wanted = {handle: hf_greedy(checkpoint("llama"), VICTIM[handle:], OUTPUT) for handle in range(1, 5)}
        assert innocent.tokens == wanted


async def test_the_largest_numbers_that_pass_are_served(worker: Worker) -> None:
    extreme: dict[str, Any] = {
        "max_tokens": MOST,
        "min_tokens": MOST,
        "repetition_penalty": 1e-45,
        "top_k": MOST,
        "top_p": 1e-45,
        "temperature": 1e-4,
        "logprobs": 20,
        "seed": -(2**63),
        "logit_bias": {0: 100.0, 1: -100.0},
    }
    async with worker.router() as router:
        message = worker.submit(2**32 - 1, FOREIGN[:5])
        message.submit.sampling.MergeFrom(types.SamplingParams(**extreme))
        message.submit.timeout_seconds, message.submit.index = math.inf, 2**32 - 1
        await router.send(message, worker.submit(2**31, VICTIM))
        await router.until_finished(2**31, 2**32 - 1)
        assert len(router.tokens[2**32 - 1]) == 64 - 5
        assert all(math.isfinite(one.logprob) for one in router.logprobs[2**32 - 1])
        assert router.tokens[2**31] == hf_greedy(checkpoint("llama"), VICTIM, OUTPUT)
