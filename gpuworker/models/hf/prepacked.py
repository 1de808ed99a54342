"""Linear layers of a transformers model on CPU: oneDNN's layout of the weights is made once, not at every call.

The operations are private to torch (torch.compile uses them). Where they are missing, or do not take the type, the
layers stay as they are. Only a plain nn.Linear is replaced, and only if no other module reads its weight; one run of
the model shows that. The unpacked weight is freed, except where an embedding shares it.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn.functional import linear

from gpuworker.memory.devices import dtype_name, free_bytes
from gpuworker.models.hf.model import TransformersModel

# How many tokens a call is laid out for; other numbers run as well, as fast as measured for 1 to 256.
_TOKENS: Final = 32
# A copy of a weight that an embedding keeps may take this much of the free memory at most.
_COPY_FRACTION: Final = 0.25
_PROBE_TOKENS: Final = 8
_MIB: Final = 1 << 20
_log = logging.getLogger(__name__)


class PrepackedLinear(nn.Module):
    """y = x · weightᵀ + bias, as nn.Linear computes it; it has no `weight` to read."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = plain.in_features, plain.out_features, plain.bias
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), _TOKENS)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight, which is neither parameter nor buffer."""
        return self._packed.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., N] for x [..., K]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


@dataclass(slots=True)
class Prepacking:
    """What was replaced: layers of how many, their bytes, and the bytes of those that an embedding keeps as well."""

    total: int = 0
    layers: int = 0
    packed_bytes: int = 0
    copied_bytes: int = 0

    def __str__(self) -> str:
        what = f"{self.layers} of {self.total} linear layers prepacked for oneDNN, {self.packed_bytes / _MIB:.0f} MiB"
        copied = f", {self.copied_bytes / _MIB:.0f} MiB of it beside embeddings that keep the same weight"
        return what + (copied if self.copied_bytes else "")


def prepack(model: TransformersModel) -> Prepacking:
    """Replace the replaceable linear layers of a model on CPU, and log the result."""
    done = Prepacking()
    if model.device.type != "cpu":
        return done
    if reason := why_not(model.dtype):
        _log.info("no prepacking in %s, linear layers run as torch has them: %s", dtype_name(model.dtype), reason)
        return done
    places = _places(model.module)
    done.total = len(places)
    able = _seen_alone(model, [place.layer for place in places])
    holders = Counter(id(weight) for each in model.module.modules() for weight in each._parameters.values())
    for place in places:
        if id(place.layer) in able:
            _replace(place, holders[id(place.layer.weight)] > 1, done)
    _log.info("%s", done)
    return done


def why_not(dtype: torch.dtype) -> str:
    """Return why torch cannot prepack in this type here; "" when it can."""
    plain = nn.utils.skip_init(nn.Linear, 16, 16, bias=False, dtype=dtype)  # leaves every random generator alone
    numbers = torch.arange(-8, 8, dtype=dtype)
    try:
        with torch.inference_mode():
            plain.weight.copy_(numbers + numbers[:, None])
            same = torch.equal(PrepackedLinear(plain)(numbers[None]), plain(numbers[None]))
    except (AttributeError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return "" if same else "its results are wrong"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a linear layer stands."""

    parent: nn.Module
    name: str
    layer: nn.Linear


def _places(module: nn.Module) -> list[_Place]:
    """Return the plain linear layers without hooks, except those that stand in several places."""
    found = [
        _Place(parent, name, layer)
        for parent in module.modules()
        for name, layer in parent._modules.items()
        if type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks
    ]
    times = Counter(id(place.layer) for place in found)
    return [place for place in found if times[id(place.layer)] == 1]


def _seen_alone(model: TransformersModel, layers: list[nn.Linear]) -> set[int]:
    """Return the ids of the layers that a forward of the model calls, and whose weight nothing else reads."""
    called: set[int] = set()
    read: set[int] = set()

    class Watched(nn.Linear):
        def __getattribute__(self, name: str) -> Any:
            if name == "weight":
                read.add(id(self))
            return super().__getattribute__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            called.add(id(self))
            return linear(x, cast("torch.Tensor", self._parameters["weight"]), self.bias)

    for layer in layers:
        layer.__class__ = Watched
    try:
        model.reference_logits(torch.arange(min(_PROBE_TOKENS, model.vocab_size))[None])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return set()  # the self-test reports the error
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
    return called - read


def _replace(place: _Place, copied: bool, done: Prepacking) -> None:
    """Replace one layer and free its weight, unless the copy of a shared weight would take too much memory."""
    nbytes = place.layer.weight.nbytes
    if copied and nbytes > _COPY_FRACTION * free_bytes(place.layer.weight.device):
        _log.info("%s is not prepacked: beside the embedding %d MiB more are too much", place.name, nbytes // _MIB)
        return
    packed = PrepackedLinear(place.layer)
    setattr(place.parent, place.name, packed)
    place.layer._parameters.clear()  # memory is freed layer by layer
    done.layers += 1
    done.packed_bytes += packed.packed_bytes
    done.copied_bytes += packed.packed_bytes if copied else 0
