"""A constraint that compiles for longer than the request computes: `quire why` says so."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Final

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from tests.support.suite import chat, running_suite
from tests.support.why import head_of, outcome_of

_random = random.Random(23)
# Of a schema; they make some 50 KB of text.
_PROPERTIES: Final = 600


def long_schema() -> str:
    """Return a schema that nobody has sent before, and that a router and a worker need some tenths of a second for."""
    names = {f"{_random.getrandbits(64):016x}": {"type": "string", "pattern": "^[a-f]{3}$"} for _ in range(_PROPERTIES)}
    return json.dumps({"type": "object", "properties": names, "required": sorted(names)})


async def test_incident_a_constraint_that_compiles_long(tmp_path: Path) -> None:
    flags = ("--kv-blocks", "64", "--dtype", "float32")
    async with running_suite(tmp_path, StackOptions(model=CHECKPOINT, worker_flags=flags)) as suite:
        while True:  # on a busy machine a step may take as long
            request = chat("Say something.", max_tokens=2)
            request.request_id = f"incident-{_random.getrandbits(32)}"
            request.json_schema = long_schema()
            await suite.generate(request)
            found = await outcome_of(suite, request)
            work = sum(seconds for name, seconds in found.items() if name in ("before.prefill", "after.decode"))
            if found.get("before.constraint", 0.0) > 2 * work:
                break
        head = await head_of(suite, request.request_id)
    words = "its constraint (a schema, a regular expression or a grammar) was compiled before its first token."
    assert f"to the first token: {words}" in head
    assert "#long-constraint" in head
