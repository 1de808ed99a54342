"""What both control services say of the suite behind the router."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from common.contracts.errors import FieldViolation, InvalidRequest, NotFound
from common.contracts.limits import MAX_ABORTED_IDS
from common.untrusted.ids import ID_WORDS, is_id
from quire.inference.v1 import inference_pb2
from router.contracts.ports import ModelCard
from router.observe.pool_words import pages_of_block
from router.tenants.tenancy import Caller


class StatusSource(Protocol):
    def model(self) -> ModelCard: ...

    def status(self) -> inference_pb2.GetStatusResponse: ...


class PortRouters(Protocol):
    """The routers of one port, this one among them."""

    async def add_to(self, answer: inference_pb2.GetStatusResponse) -> None:
        """Add the requests of the other routers to those of this one."""
        ...

    async def abort(self, request: inference_pb2.AbortRequest) -> inference_pb2.AbortResponse:
        """End requests at all routers of the port. Raises NotFound where none has the id."""
        ...


async def abort_all(routers: PortRouters, ids: Sequence[str], caller: Caller) -> None:
    """End the requests of these ids that belong to the caller's tenant; an admin tenant ends any.

    Those that no longer run are passed over. Raises InvalidRequest for what is no id, before anything ends.
    """
    if len(ids) > MAX_ABORTED_IDS:
        what = f"has {len(ids)} ids; expected at most {MAX_ABORTED_IDS}; send several calls"
        raise InvalidRequest(FieldViolation("request_ids", what))
    wrong = [
        FieldViolation(f"request_ids[{place}]", f"is not {ID_WORDS}")
        for place, each in enumerate(ids)
        if not is_id(each)
    ]
    if wrong:
        raise InvalidRequest(*wrong)
    tenant = "" if caller.tenant.admin else caller.tenant.name
    for each in ids:
        with suppress(NotFound):
            await routers.abort(inference_pb2.AbortRequest(request_id=each, tenant=tenant))


@dataclass(frozen=True, slots=True)
class Totals:
    """Requests inside the routers, and sums over the workers that serve.

    Blocks are those of a prompt, of as many pages as the pool's groups of layers take. A caller with a key that is no
    admin sees 0 for what others do.
    """

    queued: int
    running: int
    blocks: int
    unheld_blocks: int
    sequences: int

    @staticmethod
    def of(status: inference_pb2.GetStatusResponse, card: ModelCard, caller: Caller) -> Totals:
        workers = [each for each in status.workers if each.state == "connected" and each.disaggregation != "prefill"]
        pages, sequences = pages_of_block(card.identity.kv_geometry), sum(each.max_num_seqs for each in workers)
        blocks = sum(each.num_blocks // pages for each in workers)
        if caller.credential and not caller.tenant.admin:
            return Totals(0, 0, blocks, blocks, sequences)
        unheld = sum(each.unheld_blocks // pages for each in workers)
        return Totals(status.queued_requests, status.running_requests, blocks, unheld, sequences)
