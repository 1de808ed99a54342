"""Chats whose answers copy from the prompt, as SmolLM2-135M really does: it quotes, corrects and edits plain prose.

A model of this size does not copy tables, marks or diagrams, and it replaces words only after an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_BREAD: Final = (
    "To make bread, mix 500 grams of flour with 10 grams of salt and 7 grams of dry yeast. Add 320 millilitres of warm "
    "water, knead the dough for ten minutes, and let it rest for an hour. Then shape a loaf and bake it at 220 degrees "
    "for 35 minutes. Let the bread cool on a rack before you cut it, or the crumb will be sticky. A loaf keeps for "
    "three days in a paper bag, and for two months in the freezer."
)
_LEASE: Final = (
    "The KV manager owns the block tables. The GPU worker runs on blocks that the manager leased to it ahead of need, "
    "so no token waits for a call. The router decides where a request runs. A worker touches only blocks that the "
    "manager granted to it. The manager grants a block again only after the worker reported the release. After every "
    "loss of a stream the worker sends an inventory, and the manager rebuilds its ledger."
)
_LIGHT: Final = (
    "The old lighthouse stands on a rock north of the harbour. Its keeper, a quiet man called Erik, climbs the 142 "
    "steps every evening to light the lamp. When the fog is thick, he rings a bronze bell that was brought from Lisbon "
    "in 1857. In winter the boat comes only once a week, with coal, flour and letters. Erik reads the letters twice "
    "and keeps them in a tin box under the stairs."
)
# Each text, and a word of it with what takes its place.
TEXTS: Final = ((_BREAD, "bread", "cake"), (_LEASE, "worker", "server"), (_LIGHT, "Erik", "Magnus"))

_SYSTEM: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_QUOTE: Final = "Repeat the following text word for word, and write nothing else.\n\n"
_CORRECT: Final = "Correct the spelling mistakes in this text. Change nothing else.\n\n"
_EXAMPLE: Final = ("The cat sleeps on the mat. A cat likes milk.", "The dog sleeps on the mat. A dog likes milk.")


def chats() -> list[str]:
    """Return the prompts in SmolLM2's template: each text to quote, to correct, and to edit after an example."""
    example = _replace("cat", "dog", _EXAMPLE[0])
    asked = [[_QUOTE + text, _CORRECT + text] for text, _, _ in TEXTS]
    edits = [_chat(example, _EXAMPLE[1], _replace(old, new, text)) for text, old, new in TEXTS]
    return [_chat(each) for orders in asked for each in orders] + edits


def _replace(old: str, new: str, text: str) -> str:
    return f"Replace `{old}` by `{new}` in this text:\n\n{text}"


def _chat(*turns: str) -> str:
    """Return the turns, of user and assistant alternately, up to where the assistant answers."""
    said: Sequence[tuple[str, str]] = [
        ("system", _SYSTEM),
        *zip(("user", "assistant") * len(turns), turns, strict=False),
    ]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said) + "<|im_start|>assistant\n"
