"""The Lua scripts that change the prefix index; each checks the fence and acts in one atomic step.

Every script but ACQUIRE begins with `fenced.lua`. It returns {fence} when the caller's epoch is not the fence, else
{fence, result}. Keys that a script derives from the namespace are not among KEYS: all keys of a namespace share a hash
tag and therefore a cluster slot.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final


def _source(name: str) -> str:
    return files("kvmanager.index").joinpath(f"{name}.lua").read_text(encoding="utf-8")


def _fenced(name: str) -> str:
    return _source("fenced") + _source(name)


ACQUIRE: Final = _source("acquire")
REGISTER: Final = _fenced("register")
UPDATE: Final = _fenced("update")
RENEW: Final = _fenced("renew")
RETIRE: Final = _fenced("retire")
