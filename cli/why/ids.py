"""Finds a request by the first characters of its id."""

from __future__ import annotations

from typing import Final

from cli.why.pages import Lister
from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import MAX_LISTED_DECISIONS
from common.contracts.types import DecisionKind
from quire.decision.v1 import decision_pb2 as pb

# What the HTTP APIs put before the id of a request.
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "msg_")
# Of a request that runs the router has placements alone.
_KINDS: Final = (DecisionKind.OUTCOME, DecisionKind.REJECTION, DecisionKind.ROUTING)
_SHOWN: Final = 3


def id_of(text: str) -> str:
    """Return an id, or the beginning of one that a table has cut."""
    return text.rstrip("…")


def without_prefix(name: str) -> str:
    """Return the id of a request whose answer over HTTP has this one."""
    return next((name.removeprefix(each) for each in _PREFIXES if name.startswith(each)), name)


async def request_that_begins(lister: Lister, start: str, tenant: str = "") -> str:
    """Return the id of the one recent request that begins so; "" when none does. Raises InvalidRequest for several."""
    found: dict[str, None] = {}
    for kind in _KINDS:
        wanted = pb.ListDecisionsRequest(kind=kind, tenant=tenant)
        records = (await lister.newest(wanted, from_manager=False, limit=MAX_LISTED_DECISIONS)).records
        found |= {each.request_id: None for each in reversed(records) if each.request_id.startswith(start)}
    if len(found) > 1:
        shown = ", ".join(list(found)[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
        what = f"{start} begins the ids of {len(found):,} requests ({shown}); give more of the one that you mean"
        raise InvalidRequest(FieldViolation("REQUEST", what))
    return next(iter(found), "")


async def full_id(lister: Lister, name: str, tenant: str = "") -> str:
    """Return the id of the request that a user names by it or by its beginning; the name itself when none is known."""
    for request_id in dict.fromkeys((name, without_prefix(name))):
        if (await lister.newest(pb.ListDecisionsRequest(request_id=request_id), from_manager=False, limit=1)).records:
            return request_id
    return await request_that_begins(lister, without_prefix(name), tenant) or name
