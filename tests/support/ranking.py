"""A checkpoint that ranks by its answer, as sentence-transformers stores one, and its scores under transformers."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Final

import torch

from tests.support.checkpoints import checkpoint, reference_model, tokenizer

_SAID: Final = "messages | selectattr('role', 'eq', '{}') | map(attribute='content') | first"
_TEMPLATE: Final = (
    "<|user|>{{{{ {} | default('Does it answer?') }}}}\nQuery: {{{{ {} }}}}\nDocument: {{{{ {} }}}}<|end|><|assistant|>"
)


def template() -> str:
    """Return a chat template with the roles of rerankers alone."""
    return _TEMPLATE.format(*(_SAID.format(role) for role in ("system", "query", "document")))


@functools.cache
def ranking_checkpoint(kind: str) -> Path:
    """Return a folder whose answers begin with `y` or `n`. Its generation defaults would change what is likely."""
    plain = checkpoint(kind)
    directory = plain.with_name(f"{plain.name}-ranks")
    shutil.copytree(plain, directory)
    package = "sentence_transformers.cross_encoder.modules"
    parts = [("", "Transformer"), ("1_LogitScore", "LogitScore")]
    modules = [{"idx": place, "path": path, "type": f"{package}.{name}"} for place, (path, name) in enumerate(parts)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_LogitScore").mkdir()
    yes, no = answers()
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": yes, "false_token_id": no}))
    defaults = {"temperature": 0.7, "top_k": 1, "repetition_penalty": 1.5, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    made = tokenizer()
    made.chat_template = template()
    made.save_pretrained(directory)
    return directory


def answers() -> tuple[int, int]:
    """Return the tokens of yes and no."""
    yes, no = (tokenizer().encode(each)[0] for each in "yn")
    return yes, no


@torch.inference_mode()
def scored_by_hand(directory: Path, query: str, document: str, instruction: str = "") -> float:
    """Return the probability of yes among both answers, by transformers in float32."""
    system = [{"role": "system", "content": instruction}] if instruction else []
    chat = [*system, {"role": "query", "content": query}, {"role": "document", "content": document}]
    made = tokenizer()
    made.chat_template = template()
    text = made.apply_chat_template(chat, tokenize=False)
    ids = torch.tensor([made(text, add_special_tokens=False).input_ids])
    logits = reference_model(directory)(input_ids=ids).logits[0, -1]
    yes, no = answers()
    return float(torch.sigmoid(logits[yes] - logits[no]))
