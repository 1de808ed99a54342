"""Stop texts that are special tokens: texts leave these out, so that no search in a text finds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def shown_and_hidden(stops: Sequence[str], hidden: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the stop texts to look for in a text, and the ids of those that are tokens which it leaves out."""
    texts = tuple([stop for stop in stops if stop not in hidden])
    return texts, tuple([hidden[stop] for stop in stops if stop in hidden])


def hidden_part(stop: str, hidden: Collection[str]) -> str:
    """Return a token that a text leaves out within a longer stop text, which therefore never comes; "" for none."""
    return "" if stop in hidden else next((token for token in hidden if token and token in stop), "")
