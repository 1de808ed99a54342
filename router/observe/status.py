"""The content of `GetStatus` and `GetModel`: queue, workers with load and rates, the served model."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from common.contracts.clock import Clock
from common.contracts.errors import NotFound
from common.group.leader_watch import ManagerState
from common.version import quire_version
from quire.inference.v1 import inference_pb2 as pb
from router.contracts.ports import Leaving, ModelCard, RedisState
from router.placement.admission import AdmissionLimiter
from router.workers.pool import Member, WorkerPool


class KnownManagers(Protocol):
    def managers(self) -> tuple[ManagerState, ...]:
        """Return each KV manager, and whether it leads."""
        ...


class RouterStatus:
    def __init__(
        self,
        card: ModelCard,
        pool: WorkerPool,
        admission: AdmissionLimiter,
        redis: RedisState,
        router: Leaving,
        managers: KnownManagers,
        clock: Clock,
    ) -> None:
        self._card, self._pool, self._admission = card, pool, admission
        self._redis, self._router, self._managers, self._clock = redis, router, managers, clock

    def model(self) -> ModelCard:
        """Return the served model, with the parts of its identity that workers have reported."""
        context = self._pool.context(self._card.max_model_len)
        return replace(self._card, identity=self._pool.identity, max_model_len=context)

    def status(self) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(
            queued_requests=self._admission.queued,
            running_requests=self._admission.running,
            redis_connected=self._redis.connected,
            discovery_problem=self._redis.problem,
            draining=self._router.leaving,
            managers=[self._manager(each) for each in self._managers.managers()],
            workers=[self._worker(member) for member in self._pool.members()],
            version=quire_version(),
        )

    def _manager(self, state: ManagerState) -> pb.ManagerStatus:
        return pb.ManagerStatus(
            address=state.address,
            reachable=state.reachable,
            leads=state.leads,
            term=state.term,
            state_seconds=max(0.0, self._clock.monotonic() - state.since),
            group=state.group,
        )

    def loads(self, worker_id: str = "") -> pb.GetLoadsResponse:
        """Return what each worker, or the named one, has to do. Raises NotFound for an unknown one."""
        members = [each for each in self._pool.members() if worker_id in ("", each.worker_id)]
        if worker_id and not members:
            raise NotFound(f"this router knows no worker {worker_id}; GetStatus names those that it knows")
        return pb.GetLoadsResponse(
            queued_requests=self._admission.queued,
            running_requests=self._admission.running,
            workers=map(self._load, members),
        )

    def blocks(self) -> tuple[int, int]:
        """Return the blocks of all workers that no sequence holds, and all their blocks."""
        models = [each.model for each in self._pool.members() if each.model is not None]
        return sum(each.load.unheld_blocks for each in models), sum(each.capacity.num_blocks for each in models)

    def _load(self, member: Member) -> pb.WorkerLoad:
        load, model = pb.WorkerLoad(worker_id=member.worker_id, address=member.client.address), member.model
        load.state = member.state.value
        if model is None:
            return load
        now = self._clock.monotonic()
        trouble = model.trouble(now)
        load.state = trouble[0].value if trouble is not None else load.state
        load.disaggregation = model.capacity.disaggregation.value
        load.running_sequences, load.waiting_sequences = model.load.running, model.load.waiting
        load.num_blocks, load.free_blocks = model.capacity.num_blocks, model.load.unheld_blocks
        load.used_blocks = max(0, load.num_blocks - load.free_blocks)
        load.pending_prefill_tokens = model.load.pending_prefill_tokens
        load.output_tokens_per_second = model.sampled.per_second()
        load.computed_tokens_per_second = model.computed.per_second()
        load.heartbeat_age = now - model.heartbeat_at
        return load

    def _worker(self, member: Member) -> pb.WorkerStatus:
        status = pb.WorkerStatus(
            worker_id=member.worker_id,
            address=member.client.address,
            state=member.state.value,
            reason=member.reason,
        )
        if member.facts is not None and member.facts.kv_events is not None:
            status.kv_events.CopyFrom(member.facts.kv_events)
        model = member.model
        if model is None:
            return status
        now, per_token, step = self._clock.monotonic(), model.rates.prefill_token.value, model.rates.step.predict(1)
        # The pool checks only now and then whether a worker is in trouble.
        trouble = model.trouble(now)
        if trouble is not None:
            status.state, status.reason = trouble[0].value, trouble[1]
        status.running_sequences, status.waiting_sequences = model.load.running, model.load.waiting
        status.num_blocks, status.unheld_blocks = model.capacity.num_blocks, model.load.unheld_blocks
        status.disaggregation = model.capacity.disaggregation.value
        status.max_num_seqs, status.window = model.capacity.max_num_seqs, model.capacity.window
        status.manager_attached = model.load.manager_attached
        status.prefill_tokens_per_second = 1.0 / per_token if per_token else 0.0
        status.decode_step_seconds = step or 0.0
        status.heartbeat_age = now - model.heartbeat_at
        return status
