"""Multi-head latent attention on latents: the cache holds one head of K for all queries, and V is a prefix of it.

transformers multiplies each token's latent c [rank] by `kv_b_proj` and attends on the K and V of every head
(`expand_kv`). With W_k [nope, rank] and W_v [v, rank], the rows of a head in its weight, the same is computed from c:

    scores   q_nope · (W_k c) + q_rope · k_rope  =  (q_nope W_k) · c + q_rope · k_rope
    result   sum of weights · (W_v c)            =  (sum of weights · c) W_vᵀ

So K is (c | k_rope) and V is c (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). The model's own attention, without a
step, still expands: the self-test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ATTRIBUTE = "quire_latents"
_PROBED = 2  # tokens on which a module's own expansion is compared with its weight
_CLOSE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # relative, with room for sums of 16 bits


class Latents:
    """The products around the attention of one module. H heads, T tokens; `rank` numbers of a latent."""

    def __init__(self, module: nn.Module) -> None:
        sizes: Any = module
        self.linear: nn.Linear = sizes.kv_b_proj
        self._nope, self._rope, self._values = (
            int(each) for each in (sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim)
        )

    @property
    def _by_head(self) -> torch.Tensor:
        """[H, nope + v, rank], a view of the weight."""
        return self.linear.weight.view(-1, self._nope + self._values, self.linear.in_features)

    def keys(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, which is a view of K, for latents [1, 1, T, rank] and keys after rope [1, 1, T, rope]."""
        keys = torch.cat((latent, rope), dim=-1)
        return keys, keys[..., : latent.shape[-1]]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries of latents [1, H, T, rank + rope] for queries [1, H, T, nope + rope]."""
        nope, rope = query.split((self._nope, self._rope), dim=-1)
        return torch.cat((torch.matmul(nope, self._by_head[:, : self._nope]), rope), dim=-1)

    def expand(self, attended: torch.Tensor) -> torch.Tensor:
        """Return [T, H, v] for weighted sums of latents [T, H, rank]."""
        return torch.matmul(attended.transpose(0, 1), self._by_head[:, self._nope :].mT).transpose(0, 1)

    def every_head(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K [T, H, nope + rope] and V [T, H, v] of every head for what `keys` made, [T, 1, rank + rope]."""
        latent, rope = keys[:, 0].split((self.linear.in_features, self._rope), dim=-1)
        own = self.linear(latent).view(len(keys), -1, self._nope + self._values)
        nope, values = own.split((self._nope, self._values), dim=-1)
        return torch.cat((nope, rope[:, None].expand(-1, nope.shape[1], -1)), dim=-1), values

    def describes(self, expand: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Return whether a module's `expand_kv` computes K and V of each head as this class takes them to be."""
        weight = self.linear.weight
        draw = torch.Generator().manual_seed(0)
        latent, rope = (
            torch.randn((1, 1, _PROBED, size), generator=draw).to(weight.device, weight.dtype)
            for size in (self.linear.in_features, self._rope)
        )
        keys, values = expand(latent, rope)
        own = torch.matmul(latent[0], self._by_head.mT)  # [H, T, nope + v]
        wanted = torch.cat((own[..., : self._nope], rope[0].expand(own.shape[0], -1, -1)), dim=-1)
        pairs = ((keys[0], wanted), (values[0], own[..., self._nope :]))
        return all(ours.shape == theirs.shape and _close(ours, theirs) for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Absorbed:
    """The attention layers of a model that attend on latents, and why others that could do not."""

    layers: Sequence[Latents] = ()
    reason: str = ""


def latents_of(module: nn.Module) -> Latents | None:
    """Return what `absorb_latents` attached to a module."""
    found: Latents | None = getattr(module, _ATTRIBUTE, None)
    return found


@torch.inference_mode()
def absorb_latents(model: nn.Module, attends: Callable[[], bool]) -> Absorbed:
    """Let the layers of latent attention of a model attend on latents while `attends()`, those that can."""
    modules = [each for each in model.modules() if hasattr(each, "expand_kv")]
    reasons = [_why_not(each) for each in modules]
    made = [_absorb(each, attends) for each, reason in zip(modules, reasons, strict=True) if not reason]
    if len(made) == len(modules):
        return Absorbed(made)
    what = f"in {len(modules) - len(made)} of {len(modules)} layers K and V of every head are kept, which takes many"
    return Absorbed(made, f"{what} times the bytes of latents: {'; '.join(sorted({*reasons} - {''}))}")


def _why_not(module: Any) -> str:
    """Return why a module cannot attend on latents; "" when it can."""
    linear, name = getattr(module, "kv_b_proj", None), type(module).__name__
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        return f"kv_b_proj of {name} is a {type(linear).__name__} and not a plain linear layer"
    if linear.bias is not None:
        return f"kv_b_proj of {name} has a bias"
    try:
        known = Latents(module).describes(module.expand_kv)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return f"{name} expands its latents in another way: {error}"
    return "" if known else f"{name} expands its latents in another way"


def _absorb(module: Any, attends: Callable[[], bool]) -> Latents:
    made, expand = Latents(module), module.expand_kv

    def expand_kv(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = (made.keys if attends() else expand)(latent, rope)
        return found

    module.expand_kv = expand_kv
    setattr(module, _ATTRIBUTE, made)
    return made


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-6)
    return bool(error <= _CLOSE.get(theirs.dtype, 1e-1))
