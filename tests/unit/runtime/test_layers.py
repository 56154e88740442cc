"""Shards, blocks and layers by themselves."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.base.gguf import BLOCK_TYPES
from octavo.runtime.attention.registry import choose_backend
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.group import Group
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.embedding import LMHead, VocabEmbedding
from octavo.runtime.layers.linear import MergedColumnLinear, QKVLinear, ReplicatedLinear, RowLinear
from octavo.runtime.layers.mlp import MLP, DenseArch, make_activation
from octavo.runtime.layers.norm import LayerNorm, NoNorm, RMSNorm
from octavo.runtime.platforms.platform import get_platform
from octavo.runtime.quantization.blocks import Blocks
from octavo.runtime.quantization.method import Storage
from octavo.runtime.quantization.parameter import DenseParameter, Layout, Shard, vector
from octavo.runtime.quantization.unquantized import Unquantized

Q8_0 = next(kind for kind in BLOCK_TYPES.values() if kind.name == "Q8_0")
CPU = torch.device("cpu")


def plain(storage: Storage) -> Unquantized:
    """The scheme asks nothing of a config."""
    return Unquantized(storage, None, dict)


def make_build(rank: int = 0, size: int = 1, weight_dtype: torch.dtype = torch.float32) -> BuildContext:
    platform = get_platform("cpu", 1)
    return BuildContext(
        device=CPU,
        compute_dtype=torch.float32,
        kv_dtype=torch.float32,
        kernels=platform.kernels,
        attention=choose_backend([], platform),
        parallel=ParallelContext(Group(rank, size)),
        scheme=plain(
            Storage(CPU, weight_dtype, torch.float32, platform.kernels.linear, platform.kernels.experts)
        ),
    )


def one_column_linear(build, inputs, outputs, bias):
    return MergedColumnLinear(build, inputs, (build.split("", outputs),), bias)


def fill(layer, **tensors):
    for name, tensor in tensors.items():
        layer.parameters_by_name[name].load(tensor)
    layer.after_load()
    return layer


@pytest.mark.parametrize(("rank", "expected"), [(0, ("k", 16, 0, 8)), (1, ("k", 16, 8, 8))])
def test_even_split(rank, expected):
    assert make_build(rank, 2).split("k", 16, unit=4) == expected


def test_units_fewer_than_ranks_are_repeated():
    starts = [make_build(rank, 4).split("k", 16, 8, repeat=True) for rank in range(4)]
    assert [(s.start, s.size) for s in starts] == [(0, 8), (0, 8), (8, 8), (8, 8)]


def test_uneven_splits_are_refused():
    for full, unit in ((16, 8), (18, 6)):
        with pytest.raises(ConfigError, match="tensor_parallel_size=4 does not divide"):
            make_build(0, 4).at("layers.0").split("q", full, unit)


def test_qkv_takes_whole_and_fused_tensors():
    weight = torch.randn(8 * 4, 6)
    q, k, v = weight.split([16, 8, 8])
    for rank in range(2):
        separate, fused = (QKVLinear(make_build(rank, 2), 6, 4, 2, 4, bias=False) for _ in range(2))
        for name, part in (("v", v), ("q", q), ("k", k)):
            separate.parameters_by_name["weight"].load(part, name)
        fused.parameters_by_name["weight"].load(weight)
        expected = torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
        assert torch.equal(separate.parameters_by_name["weight"].data, expected)
        assert torch.equal(fused.parameters_by_name["weight"].data, expected)
        assert (fused.num_heads, fused.num_kv_heads) == (2, 1)


def test_ranks_add_up():
    """Columns concatenate and rows add up to the whole projection, without a process group."""
    x, weight, bias = torch.randn(3, 8), torch.randn(12, 8), torch.randn(12)
    expected = functional.linear(x, weight, bias)
    columns = [
        fill(one_column_linear(make_build(r, 2), 8, 12, True), weight=weight, bias=bias) for r in range(2)
    ]
    torch.testing.assert_close(torch.cat([layer(x) for layer in columns], -1), expected)
    rows = [fill(RowLinear(make_build(r, 2), 8, 12, False), weight=weight) for r in range(2)]
    partial = [layer(part) for layer, part in zip(rows, x.chunk(2, -1), strict=True)]
    torch.testing.assert_close(partial[0] + partial[1] + bias, expected)
    whole = fill(ReplicatedLinear(make_build(1, 2), 8, 12, True), weight=weight, bias=bias)
    torch.testing.assert_close(whole(x), expected)


@pytest.mark.parametrize("vocab_size", [10, 9, 5])
def test_vocabularies_that_ranks_cannot_share_evenly(vocab_size):
    """Local rows of four ranks make up the table; the last may have none."""
    table, sizes = torch.randn(vocab_size, 6), []
    for rank in range(4):
        layer = VocabEmbedding(make_build(rank, 4), vocab_size, 6)
        layer.parameters_by_name["weight"].load(table)
        sizes.append(layer.parameters_by_name["weight"].data)
    assert torch.equal(torch.cat(sizes), table)


def test_a_tied_head_has_no_parameters():
    build, table = make_build(), torch.randn(9, 6)
    embedding = fill(VocabEmbedding(build, 9, 6), weight=table)
    head = LMHead(build, 9, 6, tied=embedding)
    assert not head.parameters_by_name
    hidden = torch.randn(2, 6)
    torch.testing.assert_close(head(hidden), hidden @ table.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_stay_narrow(dtype):
    weight = torch.randn(12, 8).to(dtype)
    layer = fill(one_column_linear(make_build(weight_dtype=dtype), 8, 12, False), weight=weight)
    assert layer.parameters_by_name["weight"].data.dtype == dtype
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), functional.linear(x, weight.float()))


def test_norms_add_to_the_residual_stream():
    x, residual, weight, bias = torch.randn(2, 8), torch.randn(2, 8), torch.randn(8), torch.randn(8)
    rms = fill(RMSNorm(make_build(), 8, 1e-5), weight=weight)
    layer = fill(LayerNorm(make_build(), 8, 1e-5, bias=True), weight=weight, bias=bias)
    total = x + residual
    expected = functional.rms_norm(total, (8,), weight, 1e-5)
    for norm, normalised in (
        (rms, expected),
        (layer, functional.layer_norm(total, (8,), weight, bias, 1e-5)),
        (NoNorm(), total),
    ):
        torch.testing.assert_close(norm.add(x, residual), (normalised, total))
        torch.testing.assert_close(norm(total), normalised)
        assert norm.add(x, None)[1] is x
    assert list(LayerNorm(make_build(), 8, 1e-5, bias=False).parameters_by_name) == ["weight"]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", functional.silu),
        ("relu", functional.relu),
        ("gelu", functional.gelu),
        ("gelu_new", lambda x: functional.gelu(x, approximate="tanh")),
        ("gelu_pytorch_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations(name, function):
    x, up, down = torch.randn(3, 8), torch.randn(12, 8), torch.randn(8, 12)
    plain = MLP(DenseArch(intermediate_size=12, activation=name, gated=False), make_build(), 8)
    fill(plain.up, weight=up)
    fill(plain.down, weight=down)
    torch.testing.assert_close(plain(x), function(x @ up.t()) @ down.t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("size", "bias", "asked"), [(1, False, True), (2, False, False), (1, True, False)])
def test_a_kernel_for_both_projections(size, bias, asked):
    """Where ranks share the sum, or a bias is to be added, the parts are computed one by one."""
    calls, x = [], torch.randn(3, 8)

    def both(x, up, gate, down):
        calls.append((up.blocks.shape, *up[1:], gate, down.blocks.shape, *down[1:]))
        return x + 1

    build = make_build(size=size)
    kernels = replace(build.kernels.linear, block_feed_forward=both)
    build = replace(build, scheme=plain(replace(build.scheme.storage, kernels=kernels)))
    mlp = MLP(DenseArch(intermediate_size=12, bias=bias), build, 8)
    fill(mlp.up, weight=torch.randn(24, 8))
    fill(mlp.down, weight=torch.randn(8, 12))
    if not asked:
        assert mlp._fused(x) is None and not calls
        return
    assert torch.equal(mlp(x), x + 1) and torch.equal(mlp.defer(x), x + 1)
    assert calls == [((24, 32), "F32", "float32", None, "silu", (8, 48), "F32", "float32", None)] * 2


def test_unknown_activations_are_refused():
    with pytest.raises(Unsupported, match="Activation 'sine' is not supported"):
        make_activation("sine", make_build().kernels.activate, gated=False)


def test_parameters_refuse_what_does_not_fit():
    parameter = DenseParameter(Layout((Shard("a", 4, 0, 4), Shard("b", 2, 0, 2)), (3,)), torch.empty(6, 3))
    with pytest.raises(BadCheckpoint, match=r"expected shape \[4, 3\], found \[4, 2\]"):
        parameter.load(torch.zeros(4, 2), "a")
    with pytest.raises(BadCheckpoint, match="no 'c'"):
        parameter.load(torch.zeros(4, 3), "c")
    parameter.load(torch.ones(2, 3), "b")
    assert parameter.missing == ["a"]
    with pytest.raises(BadCheckpoint, match="loaded before"):
        parameter.load(torch.zeros(6, 3))
    assert vector(5).shape == (5,)


@pytest.mark.parametrize("split_axis", [1, 2])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "by_expert"])
def test_a_stack_is_split_along_another_axis(split_axis, fused):
    """Three experts of [4, 6], stacked on axis 0: the ranks' parts make up the whole again."""
    experts = torch.randn(3, 4, 6)
    parts = [keep_experts(experts, rank, split_axis, fused) for rank in range(2)]
    assert {part.shape for part in parts} == {(3, 2, 6) if split_axis == 1 else (3, 4, 3)}
    assert torch.equal(torch.cat(parts, split_axis), experts)
    assert not torch.equal(torch.cat(parts[::-1], split_axis), experts)
    assert not torch.equal(keep_experts(experts.flip(0), 0, split_axis, fused), parts[0])


def keep_experts(experts, rank, split_axis, fused):
    """What one of two ranks keeps. By expert, they come last first."""
    full = experts.shape[split_axis]
    shards = tuple(Shard(str(i), full, rank * full // 2, full // 2) for i in range(len(experts)))
    layout = Layout(shards, (1, experts.shape[3 - split_axis]), split_axis=split_axis)
    parameter = DenseParameter(layout, torch.full(layout.shape, torch.nan))
    if fused:
        parameter.load(experts)
    for i, expert in [] if fused else list(enumerate(experts))[::-1]:
        parameter.load(expert, str(i))
    assert not parameter.missing and parameter.num_bytes == experts.nbytes // 2
    return parameter.data


def test_experts_of_another_shape_are_refused():
    for shape in ((3, 6, 4), (2, 4, 6), (1, 4, 6), (4, 6)):
        with pytest.raises(BadCheckpoint, match="expected shape"):
            keep_experts_of(shape, "")
    for shape in ((6, 4), (2, 4, 6), (4,)):
        with pytest.raises(BadCheckpoint, match="expected shape"):
            keep_experts_of(shape, "1")
    keep_experts_of((1, 4, 6), "1")


def keep_experts_of(shape, name):
    layout = Layout(tuple(Shard(str(i), 6, 0, 3) for i in range(3)), (1, 4), split_axis=2)
    DenseParameter(layout, torch.empty(layout.shape)).load(torch.zeros(shape), name)


def test_blocks_are_cut_where_they_end():
    blocks = Blocks(torch.arange(4 * 68, dtype=torch.int16).to(torch.uint8).view(4, 68), Q8_0)
    assert blocks.shape == (4, 64)
    assert torch.equal(blocks.narrow(0, 1, 2).data, blocks.data[1:3])
    assert torch.equal(blocks.narrow(1, 32, 32).data, blocks.data[:, 34:])
    assert torch.equal(blocks.index_select(0, torch.tensor([3, 0])).data, blocks.data[[3, 0]])
    with pytest.raises(ConfigError, match="columns 16 to 48 cannot be one rank's part"):
        blocks.narrow(1, 16, 32)
