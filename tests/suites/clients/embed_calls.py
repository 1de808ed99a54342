"""Embeds texts with sentence-transformers, from .embedders on the torch of .venv. Reads JSON, prints JSON."""

from __future__ import annotations

import json
import sys

given = json.load(sys.stdin)
sys.path.insert(0, given["packages"])

from sentence_transformers import SentenceTransformer  # noqa: E402


def vectors_of(folder: str, rewritten: str) -> list[list[float]]:
    """Return the vectors of the texts in float32; write the folder anew as the library does."""
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": "float32"})
    model.save(rewritten)
    return [[float(each) for each in vector] for vector in model.encode(given["texts"], batch_size=1)]


json.dump([vectors_of(*each) for each in given["folders"]], sys.stdout)
