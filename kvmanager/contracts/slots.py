"""The rules by which the groups of one index give workers their slots, and by which a group loses one.

Each group of managers owns some of the workers, and all groups write one index. A worker has one slot, whichever group
publishes it. Redis follows `registered` and `writable` in atomic steps (`kvmanager/index/register.lua`,
`update.lua` and `renew.lua`); a test compares both over a real server.

The fence of a group stops the past leaders of that group alone. Against other groups each slot has a fence of its own:
the generation. Every registration draws another one, so whoever registers a slot ends the writes of all others there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class NoSlot(Enum):
    """Why a worker has no slot: live workers hold all, or another group publishes this worker now."""

    FULL = "full"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class Registration:
    """What a group publishes a worker by. `session` counts the attaches of one incarnation, whatever the group."""

    worker_id: str
    incarnation: str
    session: int
    group: str
    generation: int


Slots = Mapping[int, Registration]
"""By number, from 0 without gaps: a slot keeps its last registration for ever."""


def may_follow(held: Registration, alive: bool, new: Registration) -> bool:
    """Return whether a registration of the same worker may take the slot of one that is held.

    Of one incarnation the later session is the worker's only one. Another incarnation may be another process that has
    the same id by mistake: then the group that came first keeps the worker while it renews, so that two groups do not
    publish everything again and again.
    """
    if held.incarnation == new.incarnation:
        return new.session >= held.session
    return held.group == new.group or not alive


def registered(slots: Slots, alive: frozenset[int], new: Registration, most: int) -> int | NoSlot:
    """Return the slot for a registration: the worker's own, else the first whose worker is gone, else a new one."""
    for slot, held in slots.items():
        if held.worker_id == new.worker_id:
            return slot if may_follow(held, slot in alive, new) else NoSlot.ELSEWHERE
    dead = next((slot for slot in slots if slot not in alive), None)
    if dead is not None:
        return dead
    return len(slots) if len(slots) < most else NoSlot.FULL


class Loss(Enum):
    """Why a slot cannot be renewed: it has another registration, or none, as after a wipe."""

    TAKEN = "taken"
    GONE = "gone"


def loss(slots: Slots, slot: int, generation: int) -> Loss | None:
    """Return why the liveness of a slot cannot be renewed under a generation; None where it can."""
    if writable(slots, slot, generation):
        return None
    return Loss.TAKEN if slot in slots else Loss.GONE


def writable(slots: Slots, slot: int, generation: int) -> bool:
    """Return whether entries of a slot may be written, and its liveness renewed, under a generation."""
    held = slots.get(slot)
    return held is not None and held.generation == generation
