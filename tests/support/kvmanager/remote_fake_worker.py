"""The core tests' fake worker over a real stream."""

from __future__ import annotations

import random

from grpc import aio

from common.contracts.types import FinishReason, PoolIdentity, SequenceId
from quire.kvmanager.v1 import kvmanager_pb2
from tests.support.kvmanager.fake_session import IDENTITY, RawWorker, attach_of
from tests.support.kvmanager.fake_worker import FakeWorker

BLOCKS, BLOCK_SIZE = 24, 16


class DrivenWorker:
    """One worker over all its sessions."""

    def __init__(self, worker_id: str = "w0", seed: int = 0, identity: PoolIdentity = IDENTITY) -> None:
        self._worker_id, self._rng, self._identity = worker_id, random.Random(seed), identity
        self.fake = FakeWorker(BLOCKS, BLOCK_SIZE)
        self.session = self.epoch = 0
        self.stream: RawWorker | None = None

    async def attach(self, channel: aio.Channel) -> None:
        """Open the next session with everything that the worker holds."""
        self.session += 1
        changes = {"session": self.session, "epoch_seen": self.epoch, "num_blocks": BLOCKS, "identity": self._identity}
        attach = attach_of(self._worker_id, **changes)
        self.stream = RawWorker(channel, attach)
        answer = await self.stream.attach(self.fake.inventory())
        assert answer.WhichOneof("message") == "attach_ok", answer
        assert answer.attach_ok.epoch >= self.epoch
        self.epoch = answer.attach_ok.epoch
        self.fake.deliver(await self.stream.batch())

    async def turn(self) -> None:
        """Submit and cancel a little, run a step, report, and apply what is granted on it."""
        assert self.stream is not None
        self._disturb()
        self.fake.step()
        await self.stream.report(self.fake.report())
        await self.settle()

    async def settle(self) -> None:
        """Take every batch that was granted so far; a probe that no pool can hold is cancelled in the last of them."""
        assert self.stream is not None
        probe = SequenceId(1_000_000 + self.stream.sent)
        too_long = kvmanager_pb2.Reserve(sequence=probe, num_tokens=1, max_len=BLOCKS * BLOCK_SIZE + 2)
        await self.stream.send(kvmanager_pb2.SessionRequest(report=self._probe(too_long)))
        while True:
            batch = await self.stream.batch()
            self.fake.deliver(batch)
            if probe in batch.cancel:
                return

    def _probe(self, reserve: kvmanager_pb2.Reserve) -> kvmanager_pb2.Report:
        return kvmanager_pb2.Report(step=self.fake.steps, reserve=[reserve], lease_want=self.fake._lease_want())

    def _disturb(self) -> None:
        rng, fake = self._rng, self.fake
        if len(fake.live) < 6:
            length = rng.randrange(1, 80)
            tokens = [0] * rng.randrange(0, 64) + [rng.randrange(2) for _ in range(length)]
            fake.submit(tokens, len(tokens) + rng.randrange(1, 60))
        if fake.live and rng.random() < 0.1:
            fake.cancel(rng.choice(list(fake.live)))

    async def finish(self) -> None:
        """End every sequence and give every leased block back."""
        assert self.stream is not None
        for number in list(self.fake.live):
            self.fake.cancel(number, FinishReason.CANCELLED)
        for _ in range(3):
            self.fake.step()
            await self.stream.report(self.fake.report())
            await self.settle()
