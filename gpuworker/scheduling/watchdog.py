"""When a worker's sequences should go on: what does not count as standing still."""

from __future__ import annotations

from typing import Final

# A step may take so many times what was predicted for it; one without a prediction, such as the first prefill of a
# large model on a CPU, so many seconds. The router calls a worker hung by the same measure.
_FACTOR: Final = 10.0
_UNPREDICTED_S: Final = 60.0


def waits_for_a_step(
    running: int, waiting: int, manager_attached: bool, step_age: float = 0.0, step_predicted: float = 0.0
) -> str:
    """Return in words what waits for a step to end; "" where nothing waits, or where something explains it.

    Without a manager no sequence gets blocks. A step that runs may be a long one.
    """
    if not running + waiting or not manager_attached:
        return ""
    if step_age > 0 and step_age <= (_FACTOR * step_predicted or _UNPREDICTED_S):
        return ""
    return f"{running} sequences run and {waiting} wait, and no step has ended"
