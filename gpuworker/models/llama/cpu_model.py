"""A model of the Llama family on a CPU: the forward of a step is one call into the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from common.contracts.errors import EngineFailure
from gpuworker.attention.interface import AttentionBackend, AttentionMetadata, Int32Array
from gpuworker.attention.native_parts import NativeParts
from gpuworker.checkpoints.lora import LoraAdapter, Targets
from gpuworker.memory.devices import dtype_name
from gpuworker.models.adapters import StepAdapters
from gpuworker.models.hf.loader import context_limit
from gpuworker.models.llama.adapters import NativeAdapter, native_adapter, native_places, pointers_of
from gpuworker.models.llama.pack import PackedModel
from gpuworker.models.llama.shards import Shard
from gpuworker.models.llama.spec import Rope, ropes
from gpuworker.native import library as native
from gpuworker.native.llama import PHASES, LlamaRunStruct, PartsStruct, Refusal
from gpuworker.native.ranks import RankMemory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FIRST_POSITIONS: Final = 4096


@dataclass(frozen=True, slots=True)
class DescribedRun:
    """A forward in the form that the library takes: its results, the times of its phases, and the memory it uses."""

    run: LlamaRunStruct
    out: torch.Tensor
    """Logits, or hidden states."""
    spent: ctypes.Array[ctypes.c_double]
    kept: tuple[Any, ...]


class PlacedStates:
    """Implements `gpuworker.models.step_model.RecurrentStates`: llama_states.h has what the bytes of a place are.

    Drafts have none: such a worker refuses --speculative.
    """

    def __init__(self, layers: frozenset[int], bytes_a_sequence: int) -> None:
        self.layers, self.bytes_a_sequence = layers, bytes_a_sequence
        self.layout = f"native, {bytes_a_sequence} bytes"
        self.places: Int32Array = np.empty(0, dtype=np.int32)
        """Those of the rows of the step that was announced, [R]."""
        self.reserve(0)

    def reserve(self, places: int, drafts: int = 0) -> None:
        assert not drafts, "the native path keeps no states of drafts"
        self.kept = torch.zeros((places, self.bytes_a_sequence), dtype=torch.uint8)

    def begin(self, step: AttentionMetadata, places: Int32Array) -> None:
        self.places = places

    def accept(self, place: int, drafts: int) -> None:
        raise AssertionError(f"the native path keeps no states of drafts; {drafts} were right at place {place}")


class LlamaCpuModel:
    """Implements `gpuworker.models.step_model.StepModel` over native attention. Used by one thread at a time.

    `kv_dtype` is the type of K and V in its caches. While `seconds` is a dictionary, it sums the time of each phase of
    a step under its name in `PHASES`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        packed: PackedModel,
        kv_dtype: str,
        rope: tuple[Rope, ...] = (),
        ranks: RankMemory | None = None,
        shard: Shard | None = None,
    ) -> None:
        """`rope` has the rotations of another model of this configuration; without any they are made.

        With `ranks` this process has a part of the model, `shard`, and the forward of every step runs at all ranks.
        """
        self._shard = shard
        self.config, self.packed, self.kv_dtype, self.ranks = config, packed, kv_dtype, ranks
        if ranks is not None:
            packed.struct.ranks = ctypes.pointer(ranks.struct)
        self.device, self.dtype = torch.device("cpu"), packed.dtype
        self.seconds: dict[str, float] | None = None
        self.adapters: StepAdapters | None = None
        self.states: PlacedStates | None = None
        if packed.state_bytes:
            self.states = PlacedStates(packed.spec.keeping, packed.state_bytes)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._logits = torch.empty(0, packed.spec.vocab_size) if ranks is None else ranks.logits
        if rope:
            self._use_rope(rope)
        else:
            self.extend_rope(_FIRST_POSITIONS)

    @property
    def vocab_size(self) -> int:
        return self.packed.spec.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.packed.spec.hidden_size

    @property
    def arithmetic(self) -> str:
        """What decides the bits of its logits."""
        return f"native {native.level_of(self.packed.library)}, {dtype_name(self.dtype)}, {self.packed.kinds_in_words}"

    @property
    def weight_bytes(self) -> int:
        return self.packed.num_bytes

    def scratch_bytes(self, tokens: int, kept: int) -> int:
        """Return the bytes that a step of so many tokens needs beside weights and logits, at this rank."""
        shared = 0 if self.ranks is None else self.ranks.step_bytes // self.ranks.struct.size
        return shared + self._own_bytes(tokens, kept)

    def _own_bytes(self, tokens: int, kept: int) -> int:
        return int(self.packed.library.quire_llama_scratch(self.packed.struct, tokens, kept))

    def reserve(self, tokens: int, kept: int) -> None:
        """Allocate memory for steps of up to so many tokens, and keep it: fresh pages cost more than a small step."""
        self._reserve_scratch(tokens, kept)
        if kept > len(self._logits):
            assert self.ranks is None, f"{kept} rows of logits, and ranks share {len(self._logits)}"
            self._logits = torch.empty(kept, self.vocab_size)

    def _reserve_scratch(self, tokens: int, kept: int) -> None:
        assert self.ranks is None or tokens <= self.ranks.sizes.tokens, f"{tokens} tokens are more than ranks share"
        needed = self._own_bytes(tokens, kept)
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed, dtype=torch.uint8)

    def only(self, layers: Sequence[int]) -> LlamaCpuModel:
        """Return a model of some of the layers on the same weights."""
        return LlamaCpuModel(self.config, self.packed.only(layers), self.kv_dtype, self._rope, self.ranks, self._shard)

    @property
    def adapter_targets(self) -> Targets:
        """Implement `AdaptedModel`: those of all ranks."""
        spec = self.packed.spec if self._shard is None else self._shard.whole
        return {name: (place.outputs, place.inputs) for name, place in native_places(spec).items()}

    def allow_adapters(self, max_rank: int) -> None:
        """Implement `AdaptedModel`: scratch memory grows."""
        self.packed.struct.lora_rank = max_rank

    def prepare_adapter(self, adapter: LoraAdapter) -> NativeAdapter:
        """Implement `AdaptedModel`: prepare this rank's part."""
        part = adapter if self._shard is None else self._shard.adapter(adapter)
        return native_adapter(self.packed.spec, part, self.dtype)

    def parts_of(self, attention: AttentionBackend) -> NativeParts:
        """Return what the library attends by. Raises TypeError for attention that it cannot call."""
        spec = self.packed.spec
        return NativeParts(attention, spec.num_layers, spec.num_heads, spec.sources)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, sink: AttentionBackend
    ) -> torch.Tensor:
        """Implement `StepModel`. The next forward overwrites the result."""
        inputs = token_ids.contiguous(), positions.contiguous(), keep.contiguous()
        return self._forward(self.describe(*inputs, self._places(), self.adapters), sink)

    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, sink: AttentionBackend
    ) -> torch.Tensor:
        """Implement `EmbeddingModel`."""
        inputs = token_ids.contiguous(), positions.contiguous(), keep.contiguous()
        return self._forward(self.describe_hidden(*inputs, self._places(), self.adapters), sink)

    def _places(self) -> Int32Array | None:
        return None if self.states is None else self.states.places

    def _forward(self, described: DescribedRun, sink: AttentionBackend) -> torch.Tensor:
        try:
            parts = self.parts_of(sink)
        except TypeError as error:
            raise EngineFailure(f"the native model attends by native attention: {error}") from None
        parts.plan_step()
        self._run(described.run, parts.struct, described.kept[1])
        self.add_up(described)
        return described.out[: described.run.num_keep]

    def describe(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor,
        places: Int32Array | None = None,
        adapters: StepAdapters | None = None,
    ) -> DescribedRun:
        """Return a forward of contiguous tensors for the library, on memory that later ones use too.

        `places` [R] has where each row keeps its states, for a model that has some.
        """
        self.reserve(len(token_ids), len(keep))
        results = {"logits": self._logits.data_ptr()}
        return self._describe((token_ids, positions, keep), places, adapters, self._logits, results)

    def describe_hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor,
        places: Int32Array | None = None,
        adapters: StepAdapters | None = None,
    ) -> DescribedRun:
        """Return a forward to hidden states, which are on memory of their own: later steps may run before a reader."""
        self._reserve_scratch(len(token_ids), len(keep))
        out = torch.empty(len(keep), self.hidden_size)
        return self._describe((token_ids, positions, keep), places, adapters, out, {"hidden": out.data_ptr()})

    def _describe(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        places: Int32Array | None,
        adapters: StepAdapters | None,
        out: torch.Tensor,
        results: dict[str, Any],
    ) -> DescribedRun:
        token_ids, positions, keep = inputs
        pointers = None if adapters is None else pointers_of(adapters)
        if pointers is not None:
            layers, of_token = pointers
            results |= {"adapters": layers, "adapter_of": of_token.ctypes.data, "num_adapters": len(layers)}
        states = None if self.states is None else self.states.kept
        if states is not None:
            assert places is not None, "a step of a model that keeps states says where"
            places = np.ascontiguousarray(places, dtype=np.int32)
            results |= {"states": states.data_ptr(), "places": places.ctypes.data}
            results |= {"state_stride": states.shape[1], "num_places": len(states)}
        spent = (ctypes.c_double * len(PHASES))()
        run = LlamaRunStruct(
            token_ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            keep=keep.data_ptr(),
            scratch=self._scratch.data_ptr(),
            seconds=None if self.seconds is None else spent,
            num_keep=len(keep),
            **results,
        )
        kept = (token_ids, positions, keep, self._scratch, states, places, adapters, pointers)
        return DescribedRun(run, out, spent, kept)

    def again(self, done: DescribedRun) -> bool:
        """Prepare a run that is over for another step; False where phases are timed and were not, or were and are not.

        Then it must be described anew.
        """
        timed = bool(done.run.seconds)
        if timed:
            ctypes.memset(done.spent, 0, ctypes.sizeof(done.spent))
        return timed == (self.seconds is not None)

    def add_up(self, done: DescribedRun) -> None:
        """Add the times of a run's phases, if they were taken."""
        if self.seconds is not None:
            for name, more in zip(PHASES, done.spent, strict=True):
                self.seconds[name] = self.seconds.get(name, 0.0) + more

    def _run(self, run: LlamaRunStruct, parts: PartsStruct, positions: torch.Tensor) -> None:
        forward, struct = self.packed.library.quire_llama_forward, self.packed.struct
        refused = forward(struct, parts, run)
        if refused == Refusal.POSITION:
            self.extend_rope(max(int(positions.max()) + 1, 2 * struct.num_positions))
            refused = forward(struct, parts, run)
        if refused:
            raise EngineFailure(f"the step has a {Refusal(refused).name.lower()} that the model does not know")

    def extend_rope(self, positions: int) -> None:
        """Extend the rope table to so many positions, at most those of the model; no step runs meanwhile."""
        length = min(positions, context_limit(self.config))
        self._use_rope(ropes(self.config, length))

    def _use_rope(self, rope: tuple[Rope, ...]) -> None:
        self._rope, struct = rope, self.packed.struct
        struct.num_positions = len(rope[0].table)
        for found, each in zip(struct.ropes, rope, strict=False):
            found.table, found.pairs, found.apart = each.table.data_ptr(), each.table.shape[2], each.apart
