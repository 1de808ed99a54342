"""Workers' streams to a manager process, 50 reports a second each, and how long a grant takes after its report.

    python -m bench.manager_load.driver ADDRESS FIRST_WORKER WORKERS SEQUENCES SECONDS

The figures come as one line of JSON. A report that asks for blocks counts until the batch that acknowledges it is here.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Final

import uvloop

from bench.manager_load.reporter import BLOCK_SIZE, Reporter
from common.contracts.lease import Attach, Inventory
from common.contracts.types import KvGeometry, PoolIdentity
from common.process.garbage import collect_rarely
from common.rpc.server import open_channel
from common.wire.inventory_codec import inventory_chunks
from common.wire.lease_codec import attach_to_proto, batch_from_proto, report_to_proto
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

RATE: Final = 50.0
_WARM_UP: Final = 3.0
# As the manager has it.
_WALKS: Final = 5
_IDENTITY: Final = PoolIdentity("bench", "none", BLOCK_SIZE, KvGeometry(1, 1, 1, 1, "float32"))


class Stream:
    """One worker's session."""

    def __init__(self, stub: kvmanager_pb2_grpc.KvManagerServiceStub, number: int, sequences: int) -> None:
        self._reporter, self._name = Reporter(number, sequences), f"w{number}"
        self._sequences = sequences
        self._call = stub.Session()
        self._sent = 0
        self._asked: list[tuple[int, float]] = []
        self._before = (0, 0)
        self.attached, self.measuring = asyncio.Event(), asyncio.Event()
        self.seconds: list[float] = []
        self.reports = self.late = 0

    @property
    def tokens(self) -> int:
        """Tokens of the measured steps."""
        return self._reporter.tokens - self._before[0]

    @property
    def admitted(self) -> int:
        """Sequences admitted during the measured steps."""
        return self._reporter.admitted - self._before[1]

    async def _write(self, message: kvmanager_pb2.SessionRequest) -> None:
        self._sent += 1
        message.session, message.seq = 1, self._sent
        await self._call.write(message)

    async def read(self) -> None:
        """Attach, and take what the manager sends until the stream is cancelled."""
        blocks, name = self._reporter.num_blocks, self._name
        attach = Attach(
            name, name.encode().ljust(16), 1, 0, _IDENTITY, blocks, "127.0.0.1:1", max_num_seqs=self._sequences
        )
        await self._write(kvmanager_pb2.SessionRequest(attach=attach_to_proto(attach)))
        for chunk in inventory_chunks(Inventory()):
            await self._write(kvmanager_pb2.SessionRequest(inventory=chunk))
        async for response in self._call:
            now = time.perf_counter()
            if response.HasField("attach_ok"):
                self.attached.set()
            elif response.HasField("batch"):
                self._reporter.apply(batch_from_proto(response.batch))
                self._take_times(response.ack, now)

    def _take_times(self, ack: int, now: float) -> None:
        done = [began for seq, began in self._asked if seq <= ack]
        self._asked = [each for each in self._asked if each[0] > ack]
        if self.measuring.is_set():
            self.seconds += [now - began for began in done]

    async def write(self, begin: float, steps: int, measured: int) -> None:
        """Report `steps` times at the fixed rate, the late ones too, and measure the last ones."""
        for step in range(steps):
            if step == steps - measured:
                self._before = self._reporter.tokens, self._reporter.admitted
                self.measuring.set()
            due, now = begin + step / RATE, time.perf_counter()
            if now < due:
                await asyncio.sleep(due - now)
            report = self._reporter.step()
            if report.reserve:
                self._asked.append((self._sent + 1, time.perf_counter()))
            await self._write(kvmanager_pb2.SessionRequest(report=report_to_proto(report)))
            if self.measuring.is_set():
                self.reports += 1
                self.late += now > due + 1 / RATE

    def cancel(self) -> None:
        self._call.cancel()


async def drive(address: str, first: int, workers: int, sequences: int, seconds: float) -> dict[str, object]:
    """Run the workers and return their figures over the time after the warm-up."""
    async with open_channel(address) as channel:
        stub = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
        streams = [Stream(stub, number, sequences) for number in range(first, first + workers)]
        readers = [asyncio.create_task(each.read()) for each in streams]
        await asyncio.gather(*(each.attached.wait() for each in streams))
        # A pause of this process would count as the manager's: a grant waits in the socket meanwhile.
        collect_rarely(_WALKS)
        print("ATTACHED", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        begin, measured = time.perf_counter(), round(seconds * RATE)
        steps = measured + round(_WARM_UP * RATE) + sequences
        writers = [
            asyncio.create_task(each.write(begin + number / workers / RATE, steps, measured))
            for number, each in enumerate(streams)
        ]
        await asyncio.gather(*(each.measuring.wait() for each in streams))
        began = time.perf_counter()
        print("MEASURING", flush=True)
        await asyncio.gather(*writers)
        took = time.perf_counter() - began
        for each in streams:
            each.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return {
        "grant_seconds": [each for stream in streams for each in stream.seconds],
        "reports": sum(each.reports for each in streams),
        "late": sum(each.late for each in streams),
        "tokens": sum(each.tokens for each in streams),
        "admitted": sum(each.admitted for each in streams),
        "seconds": took,
    }


def main() -> None:
    address, first, workers, sequences, seconds = sys.argv[1:6]
    result = uvloop.run(drive(address, int(first), int(workers), int(sequences), float(seconds)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
