"""Parts of a router that follow from its settings and its checkpoint alone."""

from __future__ import annotations

import logging

from common.checkpoint.fingerprint import model_fingerprint
from common.checkpoint.gguf.names import served_name
from common.contracts.clock import Clock
from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.limits import MAX_BATCH_REQUESTS
from common.contracts.types import PoolIdentity
from common.settings.pool_key import pool_key_of
from router.answers.reading import Dialects
from router.answers.text.checkpoint import Checkpoint
from router.answers.text.checkpoint_text import CheckpointText
from router.api.openai.batches.folder import BatchFolder
from router.api.openai.batches.runner import BatchParts, BatchRunner
from router.api.openai.batches.uploads import Uploads
from router.config import RouterSettings
from router.contracts.identity import UNKNOWN_ARITHMETIC, UNKNOWN_GEOMETRY, UNKNOWN_POOLING
from router.contracts.ports import ModelCard
from router.tenants.directory import PeerDirectory, TenantDirectory
from router.tenants.tenants_file import read_server_key
from router.workers.discovery import EntryRules
from router.workers.worker_networks import LOOPBACK, PRIVATE, WorkerNetworks


def authenticator_of(settings: RouterSettings, model: str) -> PeerDirectory | TenantDirectory:
    """Return what recognises callers. Raises InvalidConfig for a wrong file, and for tenants without a server key."""
    if settings.tenants is None:
        return PeerDirectory()
    if settings.server_key_file is None:
        what = "is missing; tenants need it, equal on all routers of a pool: openssl rand -hex 32 > FILE"
        raise InvalidConfig(FieldViolation("--server-key-file", what))
    return TenantDirectory(settings.tenants, read_server_key(settings.server_key_file), model)


def batches_of(
    settings: RouterSettings, authenticator: PeerDirectory | TenantDirectory, clock: Clock, context: int
) -> BatchParts | None:
    """Return what files and batches need, if they have a folder. Raises InvalidConfig where it cannot be written.

    `context` are the tokens that a request has at most.
    """
    if settings.batch_dir is None:
        return None
    folder = BatchFolder(settings.batch_dir)
    at_once = batch_requests(settings.max_queued_requests, settings.max_tokens_in_flight, context)

    def now() -> float:
        return clock.time_ns() / 1e9

    return BatchParts(folder, Uploads(folder, now), BatchRunner(folder, authenticator.known, now, at_once), now)


def batch_requests(max_queued: int, max_tokens: int | None, context: int) -> int:
    """Return how many requests of batches may be in the router: its bounds refuse clients who wait, whoever is there.

    A quarter of the queue, and no more than fill half of the tokens in flight.
    """
    tokens = MAX_BATCH_REQUESTS if max_tokens is None else max_tokens // (2 * context)
    return max(1, min(MAX_BATCH_REQUESTS, max_queued // 4, tokens))


def dialects_of(settings: RouterSettings, text: CheckpointText) -> Dialects:
    options = settings.tool_call_parser, settings.reasoning_parser
    templates = text.template_source, text.tool_template_source
    return Dialects.of(*options, *templates, text.added_tokens, text.sees_tools)


def identity_of(settings: RouterSettings, checkpoint: Checkpoint) -> PoolIdentity:
    """Return the parts of the pool's identity that the checkpoint and the settings give."""
    model = "" if settings.load_format == "dummy" else model_fingerprint(checkpoint.directory)
    return PoolIdentity(
        model,
        checkpoint.tokenizer_fingerprint,
        settings.block_size,
        UNKNOWN_GEOMETRY,
        arithmetic=UNKNOWN_ARITHMETIC,
        pooling=UNKNOWN_POOLING,
    )


def entry_rules_of(settings: RouterSettings) -> EntryRules:
    """Return which workers in Redis count. Raises InvalidConfig when entries from beyond this machine need a key."""
    key = pool_key_of(settings)
    return EntryRules(key, WorkerNetworks(settings.worker_network or (LOOPBACK if key is None else PRIVATE)))


def name_of(settings: RouterSettings) -> str:
    """Return the name of the served model."""
    return settings.model_name[0] if settings.model_name else served_name(settings.model)


def card_of(
    settings: RouterSettings, checkpoint: Checkpoint, identity: PoolIdentity, text: CheckpointText
) -> ModelCard:
    return ModelCard(
        name=name_of(settings),
        identity=identity,
        max_model_len=checkpoint.max_model_len,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        has_chat_template=text.has_chat_template,
        aliases=tuple(settings.model_name[1:]),
        hidden_size=checkpoint.hidden_size,
        ranks=checkpoint.ranks,
    )


def what_it_waits_for(settings: RouterSettings) -> tuple[int, str]:
    """Return which worker a router waits for, and what to do where none can come, with the level of the line."""
    named = ", ".join(settings.worker)
    if named:
        return logging.INFO, f"waiting for a worker: {named}"
    if settings.redis_url:
        return logging.INFO, "waiting for a worker in Redis: one that serves this model, attached to a KV manager there"
    what = "name each with --worker HOST:PORT, or give the Redis of the KV manager with --redis-url redis://HOST:PORT"
    return logging.WARNING, f"waiting for a worker, and none can be found: {what}"
