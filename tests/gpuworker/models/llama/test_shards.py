"""Which rank has what of a model's tensors: exact numbers on tiny shapes, and every number once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpuworker.checkpoints.lora import LoraAdapter, LowRank
from gpuworker.models.llama.linears import LinearReader
from gpuworker.models.llama.shards import Cut, Place, Shard, ShardReader, why_not_sharded
from gpuworker.models.llama.spec import ExpertsSpec, LlamaSpec
from gpuworker.models.llama.weights import layer_tensors
from gpuworker.native.linear import IntegerWeight

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


def spec(heads: int = 4, kv_heads: int = 2, inner: int = 12) -> LlamaSpec:
    return LlamaSpec(
        num_layers=1,
        hidden_size=8,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=2,
        vocab_size=11,
        norm_eps=1e-6,
        scale=1.0,
        windows=(None,),
        qk_norm=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=False,
        tied=False,
    )


def cuts(shard: Shard) -> dict[str, tuple[int, tuple[tuple[int, int], ...]]]:
    return {name: (cut.dim, cut.ranges) for name, cut in shard.cuts.items() if name.endswith("weight")}


def test_heads_columns_and_rows_of_the_second_of_two_ranks() -> None:
    assert cuts(Shard(spec(), Place(1, 2))) == {
        f"{ATTENTION}.q_proj.weight": (0, ((4, 8),)),
        f"{ATTENTION}.k_proj.weight": (0, ((2, 4),)),
        f"{ATTENTION}.v_proj.weight": (0, ((2, 4),)),
        f"{ATTENTION}.o_proj.weight": (1, ((4, 8),)),
        f"{MLP}.gate_proj.weight": (0, ((6, 12),)),
        f"{MLP}.up_proj.weight": (0, ((6, 12),)),
        f"{MLP}.down_proj.weight": (1, ((6, 12),)),
        "model.embed_tokens.weight": (0, ((5, 11),)),
        "lm_head.weight": (0, ((5, 11),)),
    }


@pytest.mark.parametrize(("rank", "kept"), [(0, (0, 2)), (1, (0, 2)), (2, (2, 4)), (3, (2, 4))])
def test_ranks_share_heads_of_k_and_v_where_there_are_fewer(rank: int, kept: tuple[int, int]) -> None:
    """Queries of rank 1 are head 1, which attends to the first head of K and V as head 0 does."""
    found = cuts(Shard(spec(), Place(rank, 4)))
    assert found[f"{ATTENTION}.k_proj.weight"] == (0, (kept,))
    assert found[f"{ATTENTION}.q_proj.weight"] == (0, ((2 * rank, 2 * rank + 2),))


@given(st.sampled_from((1, 2, 4)), st.integers(1, 64), st.integers(1, 16))
def test_every_number_is_at_one_rank(size: int, vocab: int, inner: int) -> None:
    whole = replace(spec(heads=4, kv_heads=4, inner=4 * inner), vocab_size=max(vocab, size))
    shards = [Shard(whole, Place(rank, size)) for rank in range(size)]
    for name, cut in shards[0].cuts.items():
        indices = [index for shard in shards for begin, end in shard.cuts[name].ranges for index in range(begin, end)]
        assert indices == list(range(cut.whole)), name


def test_sizes_of_a_rank() -> None:
    experts = ExpertsSpec("qwen3_moe", 3, 2, 6, True, (True,), shared_size=4)
    own = Shard(replace(spec(), experts=experts), Place(0, 2)).spec
    assert (own.num_heads, own.num_kv_heads, own.intermediate_size) == (2, 1, 6)
    assert own.experts is not None
    assert (own.experts.count, own.experts.intermediate_size, own.experts.shared_size) == (3, 3, 2)
    assert (own.hidden_size, own.vocab_size) == (8, 11), "the residual stream and the logits are whole"


@pytest.mark.parametrize(
    ("whole", "size", "said"),
    [
        (spec(), 3, "does not divide the 4 heads of attention; expected one of 1, 2, 4"),
        (spec(heads=6, kv_heads=3), 2, "neither divides the 3 heads of K and V of layer 0 nor is a multiple of them"),
        (spec(inner=6), 4, "does not divide the 6 inputs of an MLP; expected one of 1, 2, 3, 6"),
        (replace(spec(heads=16, kv_heads=1, inner=16)), 16, "is more than the 11 tokens of the vocabulary"),
    ],
)
def test_sizes_that_ranks_do_not_divide_are_named(whole: LlamaSpec, size: int, said: str) -> None:
    found = why_not_sharded(whole, size)
    assert found is not None
    assert said in found
    with pytest.raises(ValueError, match=f"{size} "):
        Shard(whole, Place(0, size))


def test_a_bias_behind_a_cut_of_inputs_is_added_once() -> None:
    tensors = {f"{ATTENTION}.o_proj.weight": torch.arange(64.0).view(8, 8), f"{ATTENTION}.o_proj.bias": torch.ones(8)}
    found = []
    for rank in (0, 1):
        shard = Shard(spec(), Place(rank, 2))
        reader = ShardReader(LinearReader(tensors.__getitem__, lambda _: None, torch.float32, "none"), shard)
        (rows,) = reader.read(layer_tensors(shard.spec, 0).output).parts
        assert isinstance(rows.weight, torch.Tensor)
        assert torch.equal(rows.weight, tensors[f"{ATTENTION}.o_proj.weight"][:, 4 * rank : 4 * rank + 4])
        found.append(rows.bias)
    assert found[0] is not None
    assert found[1] is None


def test_integers_keep_the_scales_of_the_whole_weight() -> None:
    """The largest number of each output is in the first half: the second half alone would have other scales."""
    whole = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    whole[:, 0] = 9.0
    name = f"{ATTENTION}.o_proj"
    shard = Shard(replace(spec(), o_bias=False), Place(1, 2))
    reader = ShardReader(
        LinearReader({f"{name}.weight": whole}.__getitem__, lambda _: None, torch.float32, "int8"), shard
    )
    (rows,) = reader.read(layer_tensors(shard.spec, 0).output).parts
    assert isinstance(rows.weight, IntegerWeight)
    assert rows.weight.values.shape == (8, 4)
    assert torch.allclose(rows.weight.scales, torch.full((8, 1), 9.0 / 127))


def test_a_cut_through_a_group_of_integers_is_refused() -> None:
    whole, name = torch.randn(96, 96, generator=torch.Generator().manual_seed(0)), f"{ATTENTION}.o_proj"
    wide = replace(spec(), hidden_size=96, head_dim=24, o_bias=False)
    inner = LinearReader({f"{name}.weight": whole}.__getitem__, lambda _: None, torch.float32, "int4")
    shard = Shard(wide, Place(0, 2))
    with pytest.raises(ValueError, match="96 inputs in groups of 32, and a rank would have 48 of them, which cuts"):
        ShardReader(inner, shard).read(layer_tensors(shard.spec, 0).output)


def test_groups_of_integers_are_cut_at_their_borders() -> None:
    whole, name = torch.randn(384, 384, generator=torch.Generator().manual_seed(0)), f"{ATTENTION}.o_proj"
    wide = replace(spec(heads=3, kv_heads=3), hidden_size=384, head_dim=128, o_bias=False)
    inner = LinearReader({f"{name}.weight": whole}.__getitem__, lambda _: None, torch.float32, "int4")
    (all_rows,) = inner.read(layer_tensors(wide, 0).output).parts
    assert isinstance(all_rows.weight, IntegerWeight)
    assert all_rows.weight.scales.shape == (384, 3)
    for rank in range(3):
        shard = Shard(wide, Place(rank, 3))
        (rows,) = ShardReader(inner, shard).read(layer_tensors(shard.spec, 0).output).parts
        assert isinstance(rows.weight, IntegerWeight)
        assert torch.equal(rows.weight.values, all_rows.weight.values[:, 128 * rank : 128 * rank + 128])
        assert torch.equal(rows.weight.scales, all_rows.weight.scales[:, rank : rank + 1])


def test_a_cut_of_several_ranges_keeps_their_order() -> None:
    cut = Cut(0, ((0, 1), (3, 4)), 6)
    assert cut.of(torch.arange(6)).tolist() == [0, 3]
    with pytest.raises(ValueError, match="dimension 0 has 5; the configuration says 6"):
        cut.of(torch.arange(5))


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 4), (4, 2)])
def test_what_adapters_add_at_all_ranks_is_what_they_add_at_one(size: int, kv_heads: int) -> None:
    """Outputs are the ranks' side by side, heads of K and V that several have counted once; inputs are added up."""
    model, draw = spec(kv_heads=kv_heads), torch.Generator().manual_seed(1)
    tensors = layer_tensors(model, 0)
    linears = [tensors.qkv, tensors.output, tensors.gate_up, tensors.down]
    sizes = {name: (n, each.inputs) for each in linears for name, n in zip(each.parts, each.sizes, strict=True)}
    whole = LoraAdapter(
        "content",
        3,
        {
            name: LowRank(torch.randn((3, inputs), generator=draw), torch.randn((outputs, 3), generator=draw))
            for name, (outputs, inputs) in sizes.items()
        },
    )
    shards = [Shard(model, Place(rank, size)) for rank in range(size)]
    for name, (outputs, inputs) in sizes.items():
        x, total = torch.randn(inputs, generator=draw), torch.zeros(outputs)
        for shard in shards:
            part, cut = shard.adapter(whole).parts[name], shard.cuts[f"{name}.weight"]
            ((begin, end),) = cut.ranges
            if cut.dim == 0:
                total[begin:end] = part.b @ (part.a @ x)
            else:
                total += part.b @ (part.a @ x[begin:end])
        torch.testing.assert_close(total, whole.parts[name].b @ (whole.parts[name].a @ x))
        assert shards[0].adapter(whole).fingerprint == "content"
