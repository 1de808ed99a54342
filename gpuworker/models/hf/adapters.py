"""LoRA adapters on transformers' path: hooks of a module's linears, and which linears can have one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial

import numpy as np
import torch
from torch import nn

from common.contracts.errors import EngineFailure
from gpuworker.checkpoints.lora import LoraAdapter, Targets
from gpuworker.models.adapters import StepAdapters


class TorchAdapter:
    """An adapter as torch multiplies by it: the factors of each linear on the model's device, in float32."""

    def __init__(self, adapter: LoraAdapter, device: torch.device) -> None:
        self.parts = {
            name: (part.a.T.contiguous().to(device), part.b.T.contiguous().to(device))
            for name, part in adapter.parts.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.parts.values())


class LinearHooks:
    """Adds the products of a step's adapters to the outputs of a module's linears, rows of others untouched.

    `adapters_of` returns those of the step that runs.
    """

    def __init__(
        self, module: nn.Module, targets: Iterable[str], adapters_of: Callable[[], StepAdapters | None]
    ) -> None:
        self._adapters_of = adapters_of
        self._rows: tuple[StepAdapters, list[torch.Tensor]] | None = None
        self._called: set[str] = set()
        for name in targets:
            module.get_submodule(name).register_forward_hook(partial(self._add, name))

    def _add(self, name: str, module: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Add B · (A · x) in place for the tokens of each adapter: given[0] is [..., inputs], output [..., outputs]."""
        step = self._adapters_of()
        if step is None:
            return
        self._called.add(name)
        inputs, outputs = given[0].flatten(0, -2), output.view(-1, output.shape[-1])
        if len(inputs) != len(step.of_token):
            raise EngineFailure(f"{name} sees {len(inputs)} rows of a step of {len(step.of_token)} tokens")
        for adapter, rows in zip(step.adapters, self._rows_of(step, output.device), strict=True):
            factors = adapter.parts.get(name) if isinstance(adapter, TorchAdapter) else None
            if factors is not None:
                a, b = factors
                added = (inputs[rows].float() @ a) @ b
                outputs[rows] = (outputs[rows].float() + added).to(output.dtype)

    def _rows_of(self, step: StepAdapters, device: torch.device) -> list[torch.Tensor]:
        """Return the indices of each adapter's tokens, made once a step."""
        if self._rows is None or self._rows[0] is not step:
            places = [np.flatnonzero(step.of_token == place) for place in range(len(step.adapters))]
            self._rows = step, [torch.from_numpy(each).to(device) for each in places]
        return self._rows[1]

    def check(self) -> None:
        """Raise EngineFailure where the forward of a step passed over a linear that one of its adapters changes."""
        step = self._adapters_of()
        for adapter in () if step is None else step.adapters:
            if isinstance(adapter, TorchAdapter) and (missing := adapter.parts.keys() - self._called):
                raise EngineFailure(f"the step did not call {min(missing)}, which an adapter changes")

    def forget(self) -> None:
        """Hold nothing of the last step."""
        self._rows = None
        self._called.clear()


def find_linears(module: nn.Module, run: Callable[[], object], tokens: int, without: Collection[int]) -> Targets:
    """Return the linears that a forward over so many tokens, `run`, calls once with a row for each token.

    So experts, which see some of the rows, are not among them, nor the last linear, nor linears whose weights other
    code multiplies by; `without` has ids of more of these.
    """
    seen: Counter[str] = Counter()
    found: dict[str, tuple[int, int]] = {}

    def note(name: str, each: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen[name] += 1
        shapes = given[0].shape, output.shape
        if all(shape.numel() == tokens * shape[-1] for shape in shapes):
            found[name] = (output.shape[-1], given[0].shape[-1])

    handles = [
        each.register_forward_hook(partial(note, name))
        for name, each in module.named_modules()
        if isinstance(getattr(each, "in_features", None), int) and id(each) not in without and not _is_router(name)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: shape for name, shape in found.items() if seen[name] == 1}


def _is_router(name: str) -> bool:
    """Return whether a linear chooses experts: an adapter would change which ones run."""
    return name.rpartition(".")[2] in ("gate", "router")
