"""All workers of one pool: who may attach, under which epoch, and whose reports count.

Workers fence blocks by the epoch they have accepted, so a manager must not answer an attach with a lower one. Two
services may exchange blocks only when their pool identities are equal; the first attach fixes the identity unless it
was configured. It is forgotten when no worker is attached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from common.contracts.clock import Clock
from common.contracts.errors import IdentityMismatch, NotFound
from common.contracts.lease import Attach, AttachOk, AttachRejected, Inventory, public_incarnation
from common.contracts.transfer_tokens import serve_key_of
from common.contracts.types import BlockHash
from kvmanager.cache.pins import Pin, PinBook
from kvmanager.contracts import epochs
from kvmanager.contracts.ledger_config import LedgerConfig, ManagerConfig
from kvmanager.contracts.ports import Reach
from kvmanager.ledger import transfers
from kvmanager.ledger.ahead_table import AheadKind, Answer
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.peers import ServingPeer, find_peer
from kvmanager.ledger.replication import HotPrefixes, Standing, choose_worker


@dataclass(slots=True)
class WorkerRegistration:
    """An attached worker and its ledger. `ready` is set once its inventory is in and its ledger rebuilt."""

    attach: Attach
    ledger: Ledger
    ready: bool = False
    # Those that the rebuild has carried out.
    pins: tuple[Pin, ...] = ()

    @property
    def key(self) -> tuple[bytes, int]:
        """The session's identifier: the worker's incarnation and its count of attaches."""
        return (self.attach.incarnation, self.attach.session)


class WorkerRegistry:
    """Sessions by worker id, and the epoch."""

    def __init__(
        self,
        config: ManagerConfig,
        clock: Clock,
        decision_ids: Callable[[], str],
        epoch: int = 0,
    ) -> None:
        self._config = config
        self._clock = clock
        self._decision_ids = decision_ids
        self._registrations: dict[str, WorkerRegistration] = {}
        self.identity = config.identity
        self.epoch = epoch
        self.pins = PinBook(config.pin_share)
        # The id of the latest reset of the prefix cache; 0: there was none.
        self.last_reset = 0
        # What prompts have in common at several workers; None: nothing is copied for that.
        self.hot = HotPrefixes() if config.replicate else None
        # Makes the tokens with which workers fetch from each other; b"": they do not.
        self.transfer_key = b""

    # ------------------------------------------------------------ epoch

    def adopt_epoch(self, epoch: int) -> None:
        """Answer with this epoch from now on; the epoch never falls."""
        self.epoch = max(self.epoch, epoch)

    def needs_epoch(self, attach: Attach) -> bool:
        """Return whether the worker would refuse this manager's epoch."""
        return epochs.must_rise(self.epoch, attach.epoch_seen)

    # ------------------------------------------------------------ attach

    def attach(self, attach: Attach) -> WorkerRegistration | AttachRejected:
        """Register a worker whose ledger waits for the inventory, or return why the worker is refused."""
        rejected = self.find_refusal(attach)
        if rejected is not None:
            return rejected
        self.identity = self.identity or attach.identity
        self.pins.follow(self.identity)
        config, worker = LedgerConfig.of_worker(attach, self._config), attach.worker_id
        ledger = Ledger(config, self._clock, self._decision_ids, worker)
        registration = WorkerRegistration(attach, ledger)
        if self.transfer_key and attach.image_format:
            ledger.state.peers = partial(self._find_peer, attach)
        self._registrations[attach.worker_id] = registration
        return registration

    def find_refusal(self, attach: Attach) -> AttachRejected | None:
        """Return why a worker may not attach now, or None."""
        if self.identity is not None:
            mismatches = self.identity.differences(attach.identity)
            if mismatches:
                return AttachRejected(str(IdentityMismatch(mismatches)), mismatches)
        if attach.num_blocks < 1 or attach.max_num_seqs < 1 or not attach.worker_id:
            return AttachRejected("an attach needs a worker id, at least one block and at least one sequence")
        if attach.worker_id in self._registrations:
            return AttachRejected(f"a session of worker {attach.worker_id} is live", retry=True)
        return self._too_large(attach)

    def _too_large(self, attach: Attach) -> AttachRejected | None:
        config, others = self._config, self._registrations.values()
        for count, what in (
            (attach.num_blocks, "blocks"),
            (attach.host_frames, "blocks in host memory"),
            (attach.disk_frames, "blocks on disk"),
        ):
            if count > config.max_blocks_per_worker:
                return _exceeds(f"{count} {what}", config.max_blocks_per_worker, "--max-blocks-per-worker")
        if len(others) >= config.max_workers:
            return _exceeds("one worker more", config.max_workers, "--max-workers", retry=True)
        attaches = (attach, *(one.attach for one in others))
        blocks = sum(each.num_blocks + each.host_frames + each.disk_frames for each in attaches)
        if blocks > config.max_blocks:
            return _exceeds(f"{blocks} blocks with all other workers", config.max_blocks, "--max-blocks", retry=True)
        return None

    def complete(self, registration: WorkerRegistration, inventory: Inventory) -> AttachOk:
        """Rebuild the ledger and return the answer. Call `schedule` next: a worker with nothing to run sends nothing.

        Raises ProtocolViolation when the inventory contradicts itself, ValueError while a higher epoch is needed.
        """
        for _ in self.rebuild_in_steps(registration, inventory):
            pass
        return self.finish_rebuild(registration)

    def rebuild_in_steps(self, registration: WorkerRegistration, inventory: Inventory) -> Iterator[None]:
        """Rebuild the ledger in steps of some milliseconds, between which other ledgers may be served.

        Call `finish_rebuild` after the last one. Raises as `complete` does.
        """
        if self.needs_epoch(registration.attach):
            attach = registration.attach
            raise ValueError(
                f"worker {attach.worker_id} has accepted epoch {attach.epoch_seen}; take a higher one than {self.epoch}"
            )
        registration.pins = self.pins.pins
        yield from registration.ledger.pin_in_steps(registration.pins, self.pins.share)
        yield from registration.ledger.rebuild_in_steps(inventory)

    def finish_rebuild(self, registration: WorkerRegistration) -> AttachOk:
        """Count a worker whose ledger is rebuilt as attached, and return the answer."""
        if self.last_reset and registration.attach.reset != self.last_reset:
            registration.ledger.reset_cache(self.last_reset)
        if registration.pins is not self.pins.pins:  # they have changed since the rebuild began
            registration.ledger.pin(self.pins.pins, self.pins.share)
        registration.ready = True
        key, attach = b"", registration.attach
        if self.transfer_key and attach.data_address:
            key = serve_key_of(self.transfer_key, public_incarnation(attach.incarnation))
        return AttachOk(self.epoch, registration.ledger.lease_target(refill=False), key)

    def _find_peer(self, asking: Attach, reach: Reach) -> tuple[ServingPeer, int] | None:
        """Return the attached worker by which another one gets furthest, and how far."""
        ready = [(each.attach, each.ledger) for each in self._registrations.values() if each.ready]
        return find_peer(asking, ready, self.transfer_key, self._clock, reach)

    # ------------------------------------------------------------ copies ahead of need

    def wish_prefix(self, worker_id: str, block_hashes: Items[BlockHash], why: str) -> Answer:
        """Let a prefix come into a worker's host memory although nobody waits for it. Raises NotFound.

        Call `schedule` of its ledger next.
        """
        return self.ledger(worker_id).wish_prefix(AheadKind.PREFETCH, block_hashes, why)

    def note_prompts(self, worker_id: str, prompts: Items[Items[BlockHash]]) -> set[str]:
        """Note the prompts that a worker has got, and let hot prefixes come to others; return these workers."""
        return {each for hashes in prompts if hashes for each in self._replicate(worker_id, hashes)}

    def _replicate(self, asked: str, hashes: Items[BlockHash]) -> Iterator[str]:
        if self.hot is None:
            return
        now = self._clock.monotonic()
        for hot in self.hot.note_prompt(now, asked, hashes):
            prefix = hashes[: hot.blocks]
            choice = choose_worker(hot, asked, self._standings(asked, prefix))
            if choice is None or not self.hot.may_copy(now, prefix[-1], choice.worker_id):
                continue
            if self.ledger(choice.worker_id).wish_prefix(AheadKind.REPLICA, prefix, choice.why).blocks:
                yield choice.worker_id
            return

    def _standings(self, asked: str, prefix: Items[BlockHash]) -> Iterator[Standing]:
        """Yield the worker that was asked, and some that fetch from others and do not drain."""
        able = (each for each in self._registrations.values() if each.ready and each.ledger.state.peers is not None)
        stay = (each for each in able if not each.ledger.state.worker.draining)
        others = (each for each in stay if each.attach.worker_id != asked)
        for each in (*islice(others, _MOST_LOOKED_AT), self._registrations[asked]):
            state = each.ledger.state
            has = transfers.has_prefix(state, prefix)
            yield Standing(each.attach.worker_id, has, len(state.sequences.queue), state.sequences.running)

    # ------------------------------------------------------------ sessions

    def is_current(self, registration: WorkerRegistration) -> bool:
        """Return whether reports of this registration count; reports queued before a break do not."""
        return self._registrations.get(registration.attach.worker_id) is registration

    def detach(self, registration: WorkerRegistration) -> None:
        """Forget a registration whose stream broke, unless another one has replaced it."""
        if self.is_current(registration):
            del self._registrations[registration.attach.worker_id]

    def forget_identity(self) -> None:
        """Let the next attach fix the identity again, unless a worker is registered or the identity was configured."""
        if not self._registrations:
            self.identity = self._config.identity

    def reset_cache(self, number: int) -> dict[str, int]:
        """Drop the cached blocks of all attached workers that no sequence uses; return how many by worker.

        Workers that are away are reset when they attach. `number` is above 0, and no other reset has it.
        """
        self.begin_reset(number)
        return {worker: self.reset_worker(worker) for worker in self.workers()}

    def begin_reset(self, number: int) -> None:
        """Reset every worker that attaches from now on; call `reset_worker` for those that are attached."""
        self.last_reset = number

    def reset_worker(self, worker_id: str) -> int:
        """Carry out the latest reset at one worker, and return how many blocks went. Raises NotFound."""
        return self.ledger(worker_id).reset_cache(self.last_reset)

    def pin_in_steps_at(self, worker_id: str, why: str) -> Iterator[None]:
        """Let one worker keep what the pins of now name, in steps of some milliseconds. Raises NotFound."""
        return self.ledger(worker_id).pin_in_steps(self.pins.pins, self.pins.share, why)

    def pool_sizes(self) -> dict[str, int]:
        """Return the number of blocks of each attached worker."""
        return {worker: each.attach.num_blocks for worker, each in self._registrations.items() if each.ready}

    def ledger(self, worker_id: str) -> Ledger:
        """Return the ledger of an attached worker. Raises NotFound."""
        registration = self._registrations.get(worker_id)
        if registration is None or not registration.ready:
            raise NotFound(f"no worker {worker_id} is attached")
        return registration.ledger

    def workers(self) -> tuple[str, ...]:
        """Return the ids of the attached workers, sorted."""
        return tuple(sorted(worker for worker, each in self._registrations.items() if each.ready))


_MOST_LOOKED_AT: Final = 32
"""Workers that are looked at for each hot prompt."""


def _exceeds(what: str, most: int, flag: str, retry: bool = False) -> AttachRejected:
    return AttachRejected(f"the worker brings {what}; the manager takes at most {most} ({flag})", retry=retry)
