"""The network of the demo model and its first weights.

The first weights are not all noise. Recall needs two layers to agree. One notes, at each token, which tokens came
before it. The other looks for the place where those notes match the present. From noise alone that agreement did not
arise in minutes. Here the first two layers start with a rough draft of it, and training makes it exact. The draft is
the induction circuit of Olsson et al., "In-context Learning and Induction Heads", 2022.

The residual stream starts with these coordinates: [0, 63) for the token, and 63 for a constant. The token before it has
[64, 128), and the one before that [128, 192).
"""

import math
from typing import Final

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.demo_model.tokenizer import MAX_LENGTH

HIDDEN: Final = 192
HEAD_DIM: Final = 64
PAIRS: Final = HEAD_DIM // 2
ROPE_THETA: Final = 1e6
WORD: Final = 63
"""Coordinates of a word in each 64 of the residual stream; the one after the first word holds the constant."""
SHARP_PAIRS: Final = 6
"""The fastest RoPE pairs: they distinguish neighbouring offsets."""
SLOW_PAIRS: Final = 16
"""The slowest RoPE pairs: they hardly turn within 1,000 tokens, so they can compare words at any distance."""
NOISE: Final = 0.3
"""Size of the random part of a drafted head, as a share of a wholly random start."""
QUIET: Final = 0.02
"""The same share for the output of every layer: larger noise would drown the draft."""
SCALE: Final = 0.05
"""Size of a coordinate of an embedding."""
LOUD: Final = 4.0
"""Weight of the constant in a head that uses the phase alone: far above its noise."""
COPY: Final = 0.1
"""How strongly a match writes the token that it found."""


def configuration(vocabulary: int, pad: int, bos: int, eos: int) -> Qwen3Config:
    """Qwen3 with grouped-query attention; `pad`, `bos` and `eos` are token ids."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=eos,
    )


@torch.no_grad()
def build(config: Qwen3Config, drafted: bool = True) -> Qwen3ForCausalLM:
    """The network with its first weights, drawn from torch's global generator. Without the draft all are noise."""
    model = Qwen3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            quiet = QUIET if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            torch.nn.init.normal_(weight, 0.0, quiet / math.sqrt(weight.shape[1]))
    model.model.embed_tokens.weight.normal_(0.0, SCALE)
    if drafted:
        _draft_embedding(model.model.embed_tokens.weight)
        _draft_notes(Heads(model.model.layers[0].self_attn))
        _draft_match(Heads(model.model.layers[1].self_attn))
    return model


class Heads:
    """The weights of one attention layer by head: each a view that writes through to the layer."""

    def __init__(self, attention: torch.nn.Module) -> None:
        self._weights = dict(attention.named_parameters())

    def query(self, head: int) -> torch.Tensor:
        """[head_dim, hidden]"""
        return self._rows("q_proj", head)

    def key(self, group: int) -> torch.Tensor:
        """[head_dim, hidden]; two query heads share a group's keys and values."""
        return self._rows("k_proj", group)

    def value(self, group: int) -> torch.Tensor:
        """[head_dim, hidden]"""
        return self._rows("v_proj", group)

    def output(self, head: int) -> torch.Tensor:
        """[hidden, head_dim]"""
        return self._weights["o_proj.weight"][:, head * HEAD_DIM : (head + 1) * HEAD_DIM]

    def sharpen(self, factor: float) -> None:
        """Scale the queries and keys of all heads after their norms."""
        for name in ("q_norm", "k_norm"):
            self._weights[f"{name}.weight"].fill_(factor)

    def _rows(self, projection: str, index: int) -> torch.Tensor:
        return self._weights[f"{projection}.weight"][index * HEAD_DIM : (index + 1) * HEAD_DIM]


def _draft_embedding(weight: torch.Tensor) -> None:
    weight.normal_(0.0, SCALE / 10)
    weight[:, :WORD].normal_(0.0, SCALE)
    weight[:, WORD] = SCALE


def _draft_notes(heads: Heads) -> None:
    """Make heads 0 and 1 attend one and two tokens back, by RoPE phase alone, and write those tokens here."""
    turns = ROPE_THETA ** (-torch.arange(SHARP_PAIRS) / PAIRS)  # radians a token
    key, value = heads.key(0).mul_(NOISE), heads.value(0).mul_(NOISE)
    key[:SHARP_PAIRS, WORD] = LOUD
    value[:WORD, :WORD] += torch.eye(WORD)
    for head, back in ((0, 1), (1, 2)):
        query = heads.query(head).mul_(NOISE)
        query[:SHARP_PAIRS, WORD] = LOUD * torch.cos(back * turns)
        query[PAIRS : PAIRS + SHARP_PAIRS, WORD] = -LOUD * torch.sin(back * turns)
        note = HEAD_DIM * back
        # A third of the coordinates are in use here, so the norm before the layer made each sqrt(3) for SCALE.
        heads.output(head)[note : note + WORD, :WORD] += torch.eye(WORD) * SCALE / math.sqrt(3)
    heads.sharpen(2.0)


def _draft_match(heads: Heads) -> None:
    """Make heads find the place whose two notes equal this token and the first note here, and copy its token.

    The two groups compare different coordinates of the words, each in the slow pairs: the notes' order in the key is
    the one in the query, moved by one token.
    """
    slow = (slice(PAIRS - SLOW_PAIRS, PAIRS), slice(HEAD_DIM - SLOW_PAIRS, HEAD_DIM))
    for group in range(2):
        key, value = heads.key(group).mul_(NOISE), heads.value(group).mul_(NOISE)
        value[:WORD, :WORD] += torch.eye(WORD)
        for head in (2 * group, 2 * group + 1):
            query = heads.query(head).mul_(NOISE)
            for back, dims in enumerate(slow):
                query[dims, _words(back, group)] += torch.eye(SLOW_PAIRS)
            heads.output(head)[:WORD, :WORD] += torch.eye(WORD) * COPY
        for back, dims in enumerate(slow):
            key[dims, _words(back + 1, group)] += torch.eye(SLOW_PAIRS)
    heads.sharpen(1.5)


def _words(back: int, group: int) -> slice:
    """Coordinates of the token `back` tokens ago that `group` compares."""
    first = HEAD_DIM * back + SLOW_PAIRS * group
    return slice(first, first + SLOW_PAIRS)
