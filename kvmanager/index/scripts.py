"""The Lua scripts that change the prefix index; each checks the fence and acts in one atomic step.

HOLD and RESIGN are for the lease of a group. PINS_READ looks at no epoch. Every other script begins
with `epoch_in.lua`, and those that write the index with `fenced.lua` too. `fenced.lua` returns {fence}
when the caller's epoch is not the fence, else {fence, result}. Keys that a script derives from the namespace are not
among KEYS. All keys of a namespace share a hash tag and therefore a cluster slot.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from common.contracts.limits import MAX_EPOCH_LEAD, MAX_FOREIGN_EPOCH

_NUMBERS: Final = f"local MAX_FOREIGN_EPOCH, MAX_EPOCH_LEAD = {MAX_FOREIGN_EPOCH}, {MAX_EPOCH_LEAD}\n"


def _source(name: str) -> str:
    return files("kvmanager.index").joinpath(f"{name}.lua").read_text(encoding="utf-8")


def _with_epochs(*names: str) -> str:
    return _NUMBERS + "".join(map(_source, ("epoch_in", *names)))


def _fenced(*names: str) -> str:
    return _with_epochs("fenced", *names)


ACQUIRE: Final = _with_epochs("acquire")
HOLD: Final = _with_epochs("hold")
RESIGN: Final = _with_epochs("resign")
REGISTER: Final = _fenced("field_of", "register")
UPDATE: Final = _fenced("field_of", "update")
RENEW: Final = _fenced("field_of", "renew")
RETIRE: Final = _fenced("field_of", "retire")
PINS: Final = _fenced("pins")
PINS_READ: Final = _source("pins_read")
