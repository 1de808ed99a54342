"""`Pin` and `Prefetch` on the admin plane: make the block hashes of a prompt, and let the KV manager keep or move them.

The prompt's text goes no further than this router. The KV manager and Redis get hashes, which root in the cache domain
of the tenant; that one is made with the server's key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from common.contracts.clock import Clock
from common.contracts.errors import FieldViolation, InvalidRequest, QuireError, Unavailable
from common.contracts.limits import MAX_PRIORITY
from common.wire.packing import pack_hashes
from quire.inference.v1 import inference_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2
from quire.types.v1 import types_pb2
from router.api.grpc.manager_calls import ManagerCalls
from router.api.shared.call_context import Context
from router.contracts.events import Admitted, ValidatedRequest
from router.contracts.identity import is_complete
from router.contracts.ports import CallContext, Frontend, KnownPool, NamedCallers, RequestValidator, TextCodec
from router.requests.run import Prefix

_NAMED_BYTES: Final = 6


@dataclass(frozen=True, slots=True)
class PinParts:
    """What pins need of the router."""

    frontend: Frontend
    validator: RequestValidator
    codec: TextCodec
    callers: NamedCallers
    pool: KnownPool
    clock: Clock


class Pins:
    """Pins one prompt at a time; what is pinned may be computed meanwhile."""

    def __init__(self, parts: PinParts, manager: ManagerCalls) -> None:
        self._parts, self._manager = parts, manager
        self._one = asyncio.Lock()

    async def pin(self, request: pb.PinRequest, context: Context | None = None) -> pb.PinResponse:
        """Raises InvalidRequest, Unavailable without a worker or a KV manager, and what the manager answers."""
        async with self._one:
            prompt, prefix = await self._prefix(request)
            kept = await self._manager.pin(
                kvmanager_pb2.PinPrefixRequest(
                    name=request.name or f"pin-{prefix.parent_digest[:_NAMED_BYTES].hex()}",
                    tenant=request.tenant,
                    block_hashes=pack_hashes(prefix.block_hashes),
                    num_tokens=len(prompt.prompt),
                    duration=request.duration if request.HasField("duration") else None,
                )
            )
        computed_on, why_not = await self._computed(prompt, request.compute_on)
        return pb.PinResponse(
            name=kept.pin.name,
            num_tokens=kept.pin.num_tokens,
            num_blocks=kept.pin.num_blocks,
            expires=kept.pin.expires if kept.pin.HasField("expires") else None,
            durable=kept.durable,
            computed_on=computed_on,
            not_computed=why_not,
            unheard_managers=kept.unheard_managers,
        )

    async def prefetch(self, request: pb.PrefetchRequest, context: Context | None = None) -> pb.PrefetchResponse:
        """Let a prompt's blocks come into a worker's host memory.

        Raises InvalidRequest, NotFound for a worker that is not attached, Unavailable, and what the manager answers.
        """
        async with self._one:
            prompt, prefix = await self._prefix(request)
            answer = await self._manager.prefetch(
                kvmanager_pb2.PrefetchPrefixRequest(
                    worker_id=request.worker_id, block_hashes=pack_hashes(prefix.block_hashes)
                )
            )
        return pb.PrefetchResponse(
            outcome=kvmanager_pb2.PrefetchOutcome.Name(answer.outcome).rpartition("_")[2].lower(),
            num_tokens=len(prompt.prompt),
            num_blocks=answer.num_blocks,
            blocks_there=answer.blocks_there,
            blocks_coming=answer.blocks_coming,
            reason=answer.reason,
        )

    async def _prefix(self, request: pb.PinRequest | pb.PrefetchRequest) -> tuple[ValidatedRequest, Prefix]:
        """Return the prompt as a request of the tenant, and its full blocks. Raises InvalidRequest and Unavailable."""
        identity = self._parts.pool.identity
        if not is_complete(identity):
            raise Unavailable("no worker has been there yet, so that the pool is unknown; try again when one is")
        prompt = await self._validated(request)
        prefix = Prefix.of(prompt, identity, [])
        if not prefix.block_hashes:
            what = f"has {len(prompt.prompt)} tokens; expected a block of {identity.block_size} at least"
            raise InvalidRequest(FieldViolation("prompt", f"{what}: a shorter prompt is never cached"))
        return prompt, prefix

    async def _validated(self, request: pb.PinRequest | pb.PrefetchRequest) -> ValidatedRequest:
        """Return the prompt as a request of the tenant for one token."""
        if request.cache.no_cache:
            raise InvalidRequest(FieldViolation("cache.no_cache", "is set; expected a prompt that may be cached"))
        call = CallContext(self._parts.clock.monotonic(), caller=self._parts.callers.named(request.tenant))
        tokens = await self._tokens(request.prompt)
        asked = pb.GenerateRequest(
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=tokens)),
            sampling=types_pb2.SamplingParams(max_tokens=1),
            cache=request.cache,
        )
        return await self._parts.validator.validate(asked, call)

    async def _tokens(self, prompt: pb.Prompt) -> Sequence[int]:
        """Return the tokens of a prompt; of a chat those that stand before the next message, whatever that says."""
        if prompt.WhichOneof("content") is None:
            raise InvalidRequest(FieldViolation("prompt", "is missing; expected a text, a chat or token ids"))
        if not prompt.HasField("chat"):
            return await self._parts.codec.encode(prompt)
        first, second = [await self._parts.codec.encode(_followed(prompt.chat, text)) for text in ("0", "1")]
        alike = (at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
        return first[: next(alike, min(len(first), len(second)))]

    async def _computed(self, prompt: ValidatedRequest, wanted: int) -> tuple[list[str], str]:
        """Compute a prompt on so many workers, one after the other, behind all other requests.

        Return which did, and why not more.
        """
        done = list[str]()
        try:
            while len(done) < wanted:
                if len(done) >= len(self._parts.pool.models()):
                    return done, f"there are {len(done)} workers"
                done.append(await self._computed_by_another(prompt, frozenset(done)))
        except QuireError as error:
            return done, str(error)
        return done, ""

    async def _computed_by_another(self, prompt: ValidatedRequest, done: frozenset[str]) -> str:
        worker = ""
        request = replace(prompt, priority=-MAX_PRIORITY, avoids=done, arrived=self._parts.clock.monotonic())
        async with aclosing(self._parts.frontend.generate(request)) as events:
            async for event in events:
                if isinstance(event, Admitted):
                    worker = event.worker_id
        return worker


def _followed(chat: pb.Chat, text: str) -> pb.Prompt:
    """Return a chat with one message more, of the role whose turn it is."""
    longer = pb.Chat()
    longer.CopyFrom(chat)
    role = "assistant" if chat.messages and chat.messages[-1].role == "user" else "user"
    longer.messages.append(pb.ChatMessage(role=role, content=text))
    longer.continue_final_message, longer.add_generation_prompt = False, False
    return pb.Prompt(chat=longer)
