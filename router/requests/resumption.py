"""Finds what is left of a request whose router died, so that this router can go on with it.

Every worker of the pool is asked. A worker may not have seen the first router's death yet. While a worker says that
another stream has the request, the router asks it again for some seconds. So it does while some worker cannot be asked.
A worker at whose address no process listens is not waited for: its orphans have ended with it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from common.backoff import Backoff
from common.contracts.adapters import AdapterRef
from common.contracts.clock import Clock
from common.contracts.errors import (
    AlreadyExists,
    FieldViolation,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuireError,
    QuotaViolation,
    Unavailable,
)
from common.contracts.hashing import narrowed_domain
from common.contracts.limits import MAX_RESUMES_A_TENANT, MAX_SEQUENCES, MAX_SESSION_ID_CHARS
from common.untrusted.ids import ID_WORDS, is_id
from common.wire.packing import unpack_u32
from common.wire.retention_codec import tokens_from_proto
from quire.gpuworker.v1 import gpuworker_pb2 as worker_pb
from quire.inference.v1 import inference_pb2 as pb
from router.contracts.events import ValidatedRequest
from router.contracts.ports import CallContext
from router.contracts.session_ids import session_name
from router.tenants.tenancy import Tenant
from router.workers.client import WorkerClient
from router.workers.orphan_codec import sampling_of
from router.workers.orphan_queries import FoundOrphans
from router.workers.pool import Member, WorkerPool
from router.workers.resuming import UNKNOWN, Orphan, Received

# Seconds in which a worker answers, and for which a request is looked for.
ANSWER_SECONDS: Final = 2.0
SEARCH_SECONDS: Final = 5.0
_PAUSES: Final = Backoff(first=0.02, longest=1.0, jitter=0.5)
_RETRY_S: Final = 1.0
_MOST_NAMES: Final = 4
_ALLOWED: Final = ("resume", "traceparent", "session_id")


@dataclass(frozen=True, slots=True)
class Found:
    """An orphan and the connection to its worker."""

    orphan: Orphan
    client: WorkerClient
    worker_id: str


@dataclass(frozen=True, slots=True)
class Resumable:
    """A request that can go on: as its first router validated it, its sequences by index, and what the client has."""

    request: ValidatedRequest
    sequences: tuple[Found, ...]
    received: Received

    @property
    def orphaned_seconds(self) -> float:
        return max(found.orphan.orphaned_seconds for found in self.sequences)


@dataclass(frozen=True, slots=True)
class _Answers:
    """The workers' answers.

    `silent`: some did not answer, or could not be asked. `gone` are the names of those that have ended.
    """

    found: Sequence[tuple[Member, FoundOrphans]]
    silent: bool
    gone: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        return any(answer.held for _, answer in self.found)

    def sequences(self) -> dict[int, Found]:
        """Return the orphan of each index.

        A broken connection leaves two, and so does a move to another worker: then it is the longer one, and of equal
        ones the one that runs.
        """
        best: dict[int, Found] = {}
        for member, answer in self.found:
            for orphan in answer.orphans:
                known = best.get(orphan.index)
                if known is None or _rank(orphan) > _rank(known.orphan):
                    best[orphan.index] = Found(orphan, member.client, member.worker_id)
        return best

    def submit(self) -> worker_pb.Submit | None:
        return next((answer.submit for _, answer in self.found if answer.submit is not None), None)


class Resumption:
    """Looks for requests at the workers of a pool."""

    def __init__(
        self,
        pool: WorkerPool,
        clock: Clock,
        search_seconds: float = SEARCH_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._pool, self._clock = pool, clock
        self._search_seconds, self._answer_seconds = search_seconds, answer_seconds
        self._searches: Counter[str] = Counter()
        self._sought: set[tuple[str, str]] = set()

    async def find(self, request: pb.GenerateRequest, call: CallContext, again: bool = False) -> Resumable:
        """Return the request that `request.resume` names. `again`: what the client has is given once more.

        Raises InvalidRequest; NotFound for a request that is unknown, another tenant's or incomplete; AlreadyExists
        while another stream has it; Unavailable when a worker did not answer; Overloaded.
        """
        check_resume(request)
        resume, tenant = request.resume, call.caller.tenant
        with self._counted(tenant, resume.request_id):
            answers = await self._search(resume.request_id, tenant.name)
        submit, found = answers.submit(), answers.sequences()
        assert submit is not None
        named = replace(call, session_id=request.session_id or call.session_id)
        validated = _validated(submit, found[0].orphan, named, self._clock.monotonic())
        counts = tuple(resume.output_tokens_received)
        received = Received(resume.request_id, counts, resume.prompt_logprobs_received, again)
        sequences = tuple([found[index] for index in range(validated.sampling.n)])
        received.check([each.orphan for each in sequences], validated.sampling.logprobs is not None)
        return Resumable(validated, sequences, received)

    @contextmanager
    def _counted(self, tenant: Tenant, request_id: str) -> Iterator[None]:
        """Bound the searches of a tenant: each is a question to every worker, whose answers may be large."""
        if (tenant.name, request_id) in self._sought:
            raise AlreadyExists(f"request {request_id} is being looked for by another call")
        if self._searches[tenant.name] >= MAX_RESUMES_A_TENANT:
            what = f"{MAX_RESUMES_A_TENANT} requests of this caller are being looked for, and at most so many may be"
            raise Overloaded(QuotaViolation("router.resumes", what), _RETRY_S)
        self._searches[tenant.name] += 1
        self._sought.add((tenant.name, request_id))
        try:
            yield
        finally:
            self._sought.discard((tenant.name, request_id))
            self._searches[tenant.name] -= 1
            if not self._searches[tenant.name]:
                del self._searches[tenant.name]

    async def _search(self, request_id: str, tenant: str) -> _Answers:
        end, asked = self._clock.monotonic() + self._search_seconds, 0
        while True:
            answers = await self._ask(request_id, tenant)
            if not answers.held and _complete(answers):
                return answers
            if not (answers.held or answers.silent) or self._clock.monotonic() >= end:
                raise _failure(request_id, answers)
            asked += 1
            await asyncio.sleep(_PAUSES.pause(asked, random.random()))

    async def _ask(self, request_id: str, tenant: str) -> _Answers:
        everyone = list(self._pool.members())
        members = [member for member in everyone if not member.client.refused]
        answers = await asyncio.gather(*(self._answer(member, request_id, tenant) for member in members))
        found = [(member, answer) for member, answer in zip(members, answers, strict=True) if answer is not None]
        gone = tuple([member.name for member in everyone if member.client.refused])
        return _Answers(found, silent=len(found) < max(1, len(members)), gone=gone)

    async def _answer(self, member: Member, request_id: str, tenant: str) -> FoundOrphans | None:
        try:
            async with asyncio.timeout(self._answer_seconds):
                return await member.client.find_request(request_id, tenant)
        except (TimeoutError, QuireError):
            return None


def check_resume(request: pb.GenerateRequest) -> None:
    """Raise InvalidRequest for a resume that names no request, or that says anew what its request said."""
    resume, wrong = request.resume, list[FieldViolation]()
    if not is_id(resume.request_id):
        wrong.append(FieldViolation("resume.request_id", f"is not {ID_WORDS}; expected the id that Admitted had"))
    if len(resume.output_tokens_received) > MAX_SEQUENCES:
        what = f"has {len(resume.output_tokens_received)} entries; expected at most {MAX_SEQUENCES}"
        wrong.append(FieldViolation("resume.output_tokens_received", what))
    if len(request.session_id) > MAX_SESSION_ID_CHARS:
        what = f"has {len(request.session_id)} characters; expected at most {MAX_SESSION_ID_CHARS}"
        wrong.append(FieldViolation("session_id", what))
    for field, _ in request.ListFields():
        if field.name not in _ALLOWED:
            what = "cannot be combined with resume; leave it out: the request continues as it was first sent"
            wrong.append(FieldViolation(field.name, what))
    if wrong:
        raise InvalidRequest(*wrong)


def _rank(orphan: Orphan) -> tuple[int, bool]:
    return orphan.total, not orphan.ended


def _complete(answers: _Answers) -> bool:
    submit = answers.submit()
    return submit is not None and answers.sequences().keys() >= set(range(max(1, submit.sampling.n)))


def _failure(request_id: str, answers: _Answers) -> QuireError:
    if answers.held:
        what = f"request {request_id} is at another stream, which has not ended"
        return AlreadyExists(f"{what}; read that one, or try again when it is gone")
    if answers.silent:
        what = "a worker cannot be asked just now, so it is not known whether the request can be resumed"
        return Unavailable(f"{what}; try again", _RETRY_S)
    if answers.submit() is not None:
        return NotFound(f"some sequences of request {request_id} were lost with their worker; send it again")
    return NotFound(UNKNOWN.format(request_id) + _gone_words(answers.gone))


def _gone_words(gone: Sequence[str]) -> str:
    if not gone:
        return ""
    names = ", ".join(gone[:_MOST_NAMES]) + (f" and {len(gone) - _MOST_NAMES} more" if len(gone) > _MOST_NAMES else "")
    return f". What ran there has ended: no worker listens at {names}"


def _validated(submit: worker_pb.Submit, first: Orphan, call: CallContext, now: float) -> ValidatedRequest:
    """Return the request as its first router had validated it. Raises NotFound where it is not the caller's."""
    continuation, tokens = first.continuation, unpack_u32(submit.prompt_token_ids)
    return ValidatedRequest(
        prompt=tuple(tokens[: len(tokens) - submit.output_tokens_before]),
        sampling=sampling_of(submit),
        arrived=now - first.submitted_seconds - continuation.submitted_seconds,
        request_id=submit.request_id,
        deadline=call.deadline,
        priority=submit.priority,
        no_cache=submit.no_cache,
        caller=call.caller,
        cache_domain=_domain(submit, continuation.salt, call.caller.tenant),
        salt=continuation.salt,
        traceparent=submit.traceparent,
        tracestate=submit.tracestate,
        trace_id=call.trace_id,
        correlation_id=call.correlation_id,
        session=session_name(call.caller.owner, call.session_id),
        model=call.model,
        kept_special_tokens=continuation.kept_special_tokens,
        skip_special_tokens=continuation.skip_special_tokens,
        prediction=tuple(unpack_u32(submit.prediction_token_ids)),
        retention=tokens_from_proto(submit.retention),
        adapter=AdapterRef(submit.adapter, submit.adapter_fingerprint) if submit.adapter else None,
    )


def _domain(submit: worker_pb.Submit, salt: str, tenant: Tenant) -> bytes:
    """Return the cache domain of the request, which must be the caller's own or open to it."""
    for domain in (tenant.cache_domain, *(shared for _, shared in tenant.shared_domains)):
        if narrowed_domain(domain, salt) == submit.cache_domain:
            return domain
    raise NotFound(UNKNOWN.format(submit.request_id))
