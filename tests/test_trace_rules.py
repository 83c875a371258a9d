"""The rule table, operator by operator: what the labels say, and that it is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from equivariance import replay
from otfuse_cli.graph.trace.atoms import leaves
from otfuse_cli.graph.trace.call import Call, Log
from otfuse_cli.graph.trace.rules import RULES
from otfuse_cli.graph.trace.rules.table import Entry

A = torch.ops.aten


def t(*shape: int) -> Tensor:
    """Random values, away from zero where a sign would matter."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return t(*shape).abs() + 0.5


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask > 0, -1.0)


def lstm(x: Tensor, *w: Tensor) -> Any:
    h = torch.zeros(2, 3, 5, dtype=x.dtype)
    return A.lstm.input(x, [h, h], list(w), True, 1, 0.0, False, True, False)


def gru(x: Tensor, h: Tensor, *w: Tensor) -> Any:
    return A.gru.input(x, h, list(w), False, 2, 0.0, False, False, False)


def projected(x: Tensor, *w: Tensor) -> Any:
    h, c = torch.zeros(1, 3, 3, dtype=x.dtype), torch.zeros(1, 3, 5, dtype=x.dtype)
    return A.lstm.input(x, [h, c], list(w), True, 1, 0.0, False, False, False)


def observed(rows: bool) -> Callable[..., Any]:
    """Fake quantisation with an observer that is on, for each row or for all."""

    def apply(x: Tensor, low: Tensor, high: Tensor, scale: Tensor, zero: Tensor) -> Any:
        on = torch.ones(1, dtype=torch.int64)
        return A._fused_moving_avg_obs_fq_helper_functional(
            x, on, on, low, high, scale, zero, 0.1, -8, 7, 0, rows
        )

    return apply


def slice_write(x: Tensor, y: Tensor) -> Tensor:
    return A.slice_scatter(x, y, 1, 2, 5)


CASES: list[tuple[str, Callable[..., Any], list[Tensor], str]] = [
    ("relu", lambda x: F.relu(x), [t(2, 3)], "ab -> ab"),
    ("leaky-relu", lambda x: F.leaky_relu(x, 0.2), [t(2, 3)], "ab -> ab"),
    ("gelu", F.gelu, [t(2, 3)], "ab -> ab"),
    ("silu", lambda x: F.silu(x), [t(2, 3)], "ab -> ab"),
    ("softplus", F.softplus, [t(2, 3)], "ab -> ab"),
    ("hardswish", lambda x: F.hardswish(x), [t(2, 3)], "ab -> ab"),
    ("clamp", lambda x: x.clamp(-1, 1), [t(2, 3)], "ab -> ab"),
    ("cast", lambda x: x.to(torch.float32).double(), [t(2, 3)], "ab -> ab"),
    ("add", lambda x, y: x + y, [t(2, 3, 4), t(3, 1)], "abc, b1 -> abc"),
    ("add-number", lambda x: x + 1, [t(2, 3)], "ab -> ab"),
    ("rsub", lambda x: 1 - x, [t(2, 3)], "ab -> ab"),
    ("mul", lambda x, y: x * y, [t(2, 3, 4), t(3, 4)], "abc, bc -> abc"),
    ("div", lambda x, y: x / y, [t(2, 3), positive(2, 3)], "ab, ab -> ab"),
    ("pow", lambda x: x**3, [t(2, 3)], "ab -> ab"),
    (
        "where",
        lambda c, x, y: torch.where(c > 0, x, y),
        [t(2, 3), t(2, 3), t(3)],
        "ab, ab, b -> ab",
    ),
    ("masked-fill", masked, [t(2, 3, 4), t(3, 4)], "abc, bc -> abc"),
    ("lerp", lambda x, y, w: torch.lerp(x, y, w), [t(2, 3), t(2, 3), t(3)], "ab, ab, b -> ab"),
    (
        "addcmul",
        lambda x, y, z: torch.addcmul(x, y, z),
        [t(2, 3), t(2, 3), t(3)],
        "ab, ab, b -> ab",
    ),
    ("prelu", F.prelu, [t(2, 3, 4), t(3)], "abc, b -> abc"),
    ("glu", lambda x: F.glu(x, 1), [t(2, 6, 3)], "a(b+b)c -> abc"),
    ("compare", lambda x, y: (x > y) & (x < 1), [t(2, 3), t(3)], "ab, b -> ab"),
    ("linear", F.linear, [t(2, 3, 4), t(5, 4), t(5)], "abc, dc, d -> abd"),
    ("linear-vector", F.linear, [t(4), t(5, 4)], "a, ba -> b"),
    ("mm", torch.mm, [t(2, 3), t(3, 4)], "ab, bc -> ac"),
    ("bmm", torch.bmm, [t(2, 3, 4), t(2, 4, 5)], "abc, acd -> abd"),
    ("matmul", torch.matmul, [t(6, 2, 3, 4), t(6, 1, 4, 5)], "abcd, a1de -> abce"),
    ("matmul-vector", torch.matmul, [t(2, 3, 4), t(4)], "abc, c -> ab"),
    ("mv", torch.mv, [t(3, 4), t(4)], "ab, b -> a"),
    ("dot", torch.dot, [t(4), t(4)], "a, a -> "),
    ("outer", torch.outer, [t(3), t(4)], "a, b -> ab"),
    ("addmm", torch.addmm, [t(5), t(2, 3), t(3, 5)], "a, bc, ca -> ba"),
    ("baddbmm", torch.baddbmm, [t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)], "abc, abd, adc -> abc"),
    ("addbmm", torch.addbmm, [t(3, 5), t(2, 3, 4), t(2, 4, 5)], "ab, cad, cdb -> ab"),
    ("bilinear", F.bilinear, [t(2, 3), t(2, 4), t(5, 3, 4), t(5)], "ab, ac, dbc, d -> ad"),
    (
        "einsum",
        lambda x, y: torch.einsum("bhid,bhjd->bhij", x, y),
        [t(2, 3, 4, 5), t(2, 3, 6, 5)],
        "abcd, abed -> abce",
    ),
    (
        "einsum-three",
        lambda x, y, z: torch.einsum("...a,ab,cb->...c", x, y, z),
        [t(2, 6, 3), t(3, 4), t(5, 4)],
        "abc, cd, ed -> abe",
    ),
    (
        "tensordot",
        lambda x, y: torch.tensordot(x, y, dims=([1], [0])),
        [t(2, 3, 4), t(3, 5)],
        "abc, bd -> acd",
    ),
    (
        "conv1d",
        lambda x, w, b: F.conv1d(x, w, b, padding=1),
        [t(2, 3, 7), t(4, 3, 3), t(4)],
        "ab., cb., c -> ac.",
    ),
    (
        "conv2d",
        lambda x, w: F.conv2d(x, w, stride=2),
        [t(2, 3, 7, 6), t(4, 3, 3, 2)],
        "ab.., cb.. -> ac..",
    ),
    (
        "conv2d-same",
        lambda x, w: F.conv2d(x, w, padding="same"),
        [t(2, 3, 7, 6), t(4, 3, 3, 3)],
        "ab.., cb.. -> ac..",
    ),
    (
        "conv2d-unbatched",
        lambda x, w: F.conv2d(x, w),
        [t(3, 7, 6), t(4, 3, 3, 2)],
        "a.., ba.. -> b..",
    ),
    (
        "conv2d-grouped",
        lambda x, w, b: F.conv2d(x, w, b, groups=2),
        [t(2, 6, 5, 5), t(8, 3, 3, 3), t(8)],
        "a(b*c).., (b*d)c.., (b*d) -> a(b*d)..",
    ),
    (
        "conv2d-depthwise",
        lambda x, w: F.conv2d(x, w, groups=4),
        [t(2, 4, 5, 5), t(4, 1, 3, 3)],
        "a(b*1).., (b*1)1.. -> a(b*1)..",
    ),
    (
        "conv3d",
        lambda x, w: F.conv3d(x, w),
        [t(2, 3, 4, 5, 6), t(4, 3, 2, 2, 2)],
        "ab..., cb... -> ac...",
    ),
    (
        "conv-transpose1d",
        lambda x, w, b: F.conv_transpose1d(x, w, b),
        [t(2, 3, 7), t(3, 4, 3), t(4)],
        "ab., bc., c -> ac.",
    ),
    (
        "conv-transpose2d",
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        [t(2, 3, 5, 5), t(3, 4, 2, 2), t(4)],
        "ab.., bc.., c -> ac..",
    ),
    (
        "conv-transpose2d-grouped",
        lambda x, w, b: F.conv_transpose2d(x, w, b, groups=3),
        [t(2, 6, 5, 5), t(6, 4, 2, 2), t(12)],
        "a(b*c).., (b*c)d.., (b*d) -> a(b*d)..",
    ),
    (
        "conv-transpose3d",
        lambda x, w: F.conv_transpose3d(x, w),
        [t(2, 3, 4, 4, 4), t(3, 4, 2, 2, 2)],
        "ab..., bc... -> ac...",
    ),
    ("unfold", lambda x: F.unfold(x, 2), [t(2, 3, 5, 5)], "ab.. -> a(b*.)."),
    ("fold", lambda x: F.fold(x, (4, 4), 2, stride=2), [t(2, 12, 4)], "a(b*.). -> ab.."),
    ("tensor-unfold", lambda x: x.unfold(1, 3, 2), [t(2, 7, 3)], "a.b -> a.b."),
    (
        "batch-norm",
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
        [t(2, 3, 4), t(3), t(3), t(3), positive(3)],
        "abc, b, b, b, b -> abc",
    ),
    (
        "batch-norm-parts",
        lambda x, w, b, m, v: A._native_batch_norm_legit_no_training(x, w, b, m, v, 0.1, 1e-5),
        [t(2, 3, 4), t(3), t(3), t(3), positive(3)],
        "abc, b, b, b, b -> abc, ., .",
    ),
    (
        "batch-norm-without-statistics",
        lambda x, w, b: A._native_batch_norm_legit.no_stats(x, w, b, True, 0.0, 1e-5),
        [t(2, 3, 4), t(3), t(3)],
        "abc, b, b -> abc, b, b",
    ),
    (
        "batch-norm-of-a-weight",
        lambda v, g: F.batch_norm(v.reshape(1, 4, 6), None, None, g, training=True).relu().sum(2),
        [t(4, 3, 2), t(4)],
        "(1*a)bc, a -> 1a",
    ),
    (
        "instance-norm",
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        [t(2, 3, 4), t(3), t(3)],
        "abc, b, b -> abc",
    ),
    (
        "layer-norm",
        lambda x, w, b: F.layer_norm(x, (4,), w, b),
        [t(2, 3, 4), t(4), t(4)],
        "abc, c, c -> abc",
    ),
    (
        "layer-norm-two",
        lambda x, w: F.layer_norm(x, (3, 4), w),
        [t(2, 3, 4), t(3, 4)],
        "abc, bc -> abc",
    ),
    (
        "layer-norm-parts",
        lambda x: A.native_layer_norm(x, [4], None, None, 1e-5),
        [t(2, 3, 4)],
        "abc -> abc, ab., ab.",
    ),
    ("rms-norm", lambda x, w: F.rms_norm(x, (4,), w), [t(2, 3, 4), t(4)], "abc, c -> abc"),
    (
        "group-norm",
        lambda x, w, b: F.group_norm(x, 2, w, b),
        [t(2, 6, 5), t(6), t(6)],
        "a(b*c)d, (b*c), (b*c) -> a(b*c)d",
    ),
    (
        "group-norm-parts",
        lambda x: A.native_group_norm(x, None, None, 2, 6, 5, 2, 1e-5),
        [t(2, 6, 5)],
        "a(b*c)d -> a(b*c)d, ab, ab",
    ),
    (
        "local-response-norm",
        lambda x: F.local_response_norm(x, 3),
        [t(2, 6, 5, 5)],
        "a(.*.).. -> a(.*.)..",
    ),
    ("weight-norm", lambda v, g: torch._weight_norm(v, g, 0), [t(4, 3), t(4, 1)], "ab, a1 -> ab"),
    ("normalize", lambda x: F.normalize(x, dim=1), [t(2, 3, 4)], "abc -> abc"),
    (
        "cosine-similarity",
        lambda x, y: F.cosine_similarity(x, y, 1),
        [t(2, 3, 4), t(2, 3, 4)],
        "abc, abc -> ac",
    ),
    ("view-merge", lambda x: x.view(2, 12), [t(2, 3, 4)], "abc -> a(b*c)"),
    (
        "view-split",
        lambda x: x.view(2, 3, 4) + 0 * x.view(2, 3, 4).sum(2, keepdim=True),
        [t(2, 12)],
        "a(b*c) -> abc",
    ),
    ("view-refine", lambda x: x.view(6, 4).sum(1), [t(4, 6)], ".(.*a) -> ."),
    (
        "view-select",
        lambda x: [y.tanh() for y in x.view(2, 3, 4).unbind(1)],
        [t(2, 12)],
        "a(b+c+d) -> ab, ac, ad",
    ),
    (
        "view-select-some",
        lambda x: x.view(2, 3, 2, 4).permute(1, 0, 2, 3)[2].tanh(),
        [t(2, 24)],
        "a((b*c)+(d*e)+(f*g)) -> afg",
    ),
    ("flatten", lambda x: x.flatten(1), [t(2, 3, 1, 4)], "ab1c -> a(b*1*c)"),
    ("squeeze", lambda x: x.squeeze(1).unsqueeze(0), [t(2, 1, 4)], "a1b -> 1ab"),
    (
        "permute",
        lambda x: x.permute(2, 0, 1).transpose(0, 1).movedim(0, 2),
        [t(2, 3, 4)],
        "abc -> cba",
    ),
    ("t", lambda x: x.t(), [t(2, 3)], "ab -> ba"),
    ("expand", lambda x: x.expand(5, 2, 3), [t(2, 1)], "a1 -> bac"),
    ("repeat", lambda x: x.repeat(2, 1, 3), [t(2, 4)], "ab -> ca(d*b)"),
    ("repeat-interleave", lambda x: x.repeat_interleave(3, 1), [t(2, 4)], "ab -> a(b*c)"),
    ("repeat-interleave-flat", lambda x: x.repeat_interleave(3), [t(2, 4)], ".. -> ."),
    ("cat", lambda x, y: torch.cat([x, y, x], 1), [t(2, 3), t(2, 4)], "ab, ac -> a(b+c+b)"),
    ("stack", lambda x, y: torch.stack([x, y], 1), [t(2, 3), t(2, 3)], "ab, ab -> a.b"),
    ("pixel-shuffle", lambda x: F.pixel_shuffle(x, 2), [t(2, 12, 3, 3)], "a(b*.).. -> ab.."),
    ("pixel-unshuffle", lambda x: F.pixel_unshuffle(x, 2), [t(2, 3, 4, 4)], "ab.. -> a(b*.).."),
    ("channel-shuffle", lambda x: F.channel_shuffle(x, 2), [t(2, 6, 3, 3)], "a(b*c)de -> a(c*b)de"),
    ("slice", lambda x: x[:, 1:3], [t(2, 6)], "a(1+b+c) -> ab"),
    ("slice-step", lambda x: x[:, 1::3], [t(2, 6)], "a(b*(1+1+1)) -> ab"),
    ("slice-uneven", lambda x: x[:, ::4], [t(2, 6)], "a. -> a."),
    ("narrow", lambda x: x.narrow(1, 2, 3), [t(2, 6)], "a(b+c+1) -> ac"),
    ("select", lambda x: x[:, 2], [t(2, 6, 3)], "a(b+1+c)d -> ad"),
    ("unbind", lambda x: x.unbind(1), [t(2, 3, 4)], "a(1+1+1)b -> ab, ab, ab"),
    ("split", lambda x: x.split([1, 4], 1), [t(2, 5)], "a(1+b) -> a1, ab"),
    ("chunk", lambda x: x.chunk(2, 1), [t(2, 6)], "a(b+c) -> ab, ac"),
    ("slice-write", slice_write, [t(2, 6), t(2, 3)], "a(b+c+1), ac -> a(b+c+1)"),
    (
        "select-write",
        lambda x, y: A.select_scatter(x, y, 1, 2),
        [t(2, 6), t(2)],
        "a(b+1+c), a -> a(b+1+c)",
    ),
    ("embedding", lambda i, w: F.embedding(i, w), [ids(5, 2, 3), t(5, 4)], "ab, .c -> abc"),
    (
        "embedding-bag",
        lambda i, w: F.embedding_bag(i, w, mode="mean"),
        [ids(5, 2, 3), t(5, 4)],
        ".., .a -> .a",
    ),
    (
        "embedding-bag-max",
        lambda i, w: F.embedding_bag(i, w, mode="max"),
        [ids(5, 2, 3), t(5, 4)],
        ".., .. -> ..",
    ),
    (
        "meshgrid",
        lambda x, y, z: torch.meshgrid(x, y, z, indexing="ij"),
        [t(2), t(3), t(4)],
        "a, b, c -> ade, fbg, hic",
    ),
    (
        "meshgrid-columns-first",
        lambda x, y: torch.meshgrid(x, y, indexing="xy"),
        [t(2), t(3)],
        "a, b -> ca, bd",
    ),
    ("one-hot", lambda i: torch.nn.functional.one_hot(i, 7), [ids(7, 2, 3)], "ab -> ab."),
    ("index", lambda x, i: x[:, i], [t(2, 6, 3), ids(6, 4)], "a.b, c -> acb"),
    (
        "index-two",
        lambda x, i, j: x[i, :, j],
        [t(2, 6, 3), ids(2, 4), ids(3, 4)],
        ".a., b, b -> ba",
    ),
    ("index-select", lambda x, i: x.index_select(1, i), [t(2, 6, 3), ids(6, 4)], "a.b, . -> a.b"),
    ("gather", lambda x, i: x.gather(1, i), [t(2, 6, 3), ids(6, 2, 4, 3)], "a.b, a.b -> a.b"),
    (
        "scatter",
        lambda x, i, y: x.scatter(1, i, y),
        [t(2, 6, 3), ids(6, 2, 6, 3), t(2, 6, 3)],
        "a.b, a.b, a.b -> a.b",
    ),
    (
        "index-add",
        lambda x, i, y: x.index_add(0, i, y),
        [t(5, 3), ids(5, 4), t(4, 3)],
        ".a, ., .a -> .a",
    ),
    (
        "index-reduce",
        lambda x, i, y: x.index_reduce(1, i, y, "amax"),
        [t(5, 3, 2), ids(3, 4), t(5, 4, 2)],
        "a.b, ., a.b -> a.b",
    ),
    (
        "gather-along-units",
        lambda x, i: x.gather(1, i),
        [t(4, 6), ids(6, 4, 6)],
        "a., a. -> a.",
    ),
    (
        "gather-fewer",
        lambda x, i: x.gather(1, i),
        [t(4, 6, 3), ids(6, 4, 2, 2)],
        "a.., a.. -> a..",
    ),
    (
        "gather-one-index",
        lambda x, i: x.gather(0, i[:, None].expand(-1, 3)),
        [t(5, 3), ids(5, 4)],
        ".a, . -> .a",
    ),
    (
        "take-along",
        lambda x, i: x.take_along_dim(i[:, None], 0),
        [t(5, 3), ids(5, 4)],
        ".a, . -> .a",
    ),
    (
        "take-along-flat",
        lambda x, i: x.take_along_dim(i),
        [t(5, 3), ids(15, 4)],
        ".., . -> .",
    ),
    (
        "scatter-add-one-index",
        lambda x, i, y: x.scatter_add(0, i[:, None].expand(-1, 3), y),
        [t(5, 3), ids(5, 4), t(4, 3)],
        ".a, ., .a -> .a",
    ),
    (
        "scatter-mean-repeated",
        lambda x, i, y: x.scatter_reduce(0, i[:, None].repeat(1, 3), y, "mean"),
        [t(5, 3), ids(5, 4), t(4, 3)],
        ".a, ., .a -> .a",
    ),
    (
        "scatter-fewer",
        lambda x, i, y: x.scatter_add(0, i, y),
        [t(5, 3), ids(5, 4, 2), t(4, 2)],
        ".., .., .. -> ..",
    ),
    (
        "segment-mean",
        lambda x, n: torch.segment_reduce(x, "mean", lengths=n),
        [t(5, 3), torch.tensor([2, 3])],
        ".a, . -> .a",
    ),
    (
        "index-put",
        lambda x, i, y: x.index_put((i,), y),
        [t(5, 3), ids(5, 4), t(4, 3)],
        ".a, ., .a -> .a",
    ),
    (
        "index-put-second",
        lambda x, i, y: A.index_put(x, [None, i], y),
        [t(2, 5, 3), ids(5, 4), t(2, 1, 3)],
        "a.b, ., a.b -> a.b",
    ),
    (
        "index-put-apart",
        lambda x, i, j, y: A.index_put(x, [i, None, j], y),
        [t(5, 3, 6), ids(5, 4), ids(6, 4), t(4, 3)],
        ".a., ., ., .a -> .a.",
    ),
    (
        "index-put-mask",
        lambda x, y: A.index_put(x, [x > 0], y),
        [t(5, 3), t(1)],
        ".., . -> ..",
    ),
    ("topk", lambda x: x.topk(2, 1), [t(3, 6)], "a. -> a., a."),
    ("sort", lambda x: x.sort(1), [t(3, 6)], "a. -> a., a."),
    ("cumsum", lambda x: x.cumsum(1), [t(3, 6)], "a. -> a."),
    ("roll", lambda x: x.roll(1, 1), [t(3, 6)], "a. -> a."),
    ("roll-flat", lambda x: x.roll(1), [t(3, 6)], ".. -> .."),
    ("flip", lambda x: x.flip(1), [t(3, 6)], "a. -> a."),
    ("diff", lambda x: x.diff(dim=1), [t(3, 6)], "a. -> a."),
    ("tril", lambda x: x.tril(), [t(2, 4, 4)], "a.. -> a.."),
    ("diagonal", lambda x: x.diagonal(dim1=1, dim2=2), [t(2, 4, 4)], "a.. -> a."),
    ("histc", lambda x: x.histc(4), [t(3, 6)], ".. -> ."),
    ("max-pool1d", lambda x: F.max_pool1d(x, 2), [t(2, 3, 6)], "ab. -> ab."),
    (
        "max-pool2d",
        lambda x: F.max_pool2d(x, 2, return_indices=True),
        [t(2, 3, 6, 6)],
        "ab.. -> ab.., ab..",
    ),
    ("max-pool3d", lambda x: F.max_pool3d(x, 2), [t(2, 3, 4, 4, 4)], "ab... -> ab..."),
    ("avg-pool1d", lambda x: F.avg_pool1d(x, 2), [t(2, 3, 6)], "ab. -> ab."),
    ("avg-pool2d", lambda x: F.avg_pool2d(x, 2), [t(2, 3, 6, 6)], "ab.. -> ab.."),
    ("avg-pool3d", lambda x: F.avg_pool3d(x, 2), [t(2, 3, 4, 4, 4)], "ab... -> ab..."),
    ("adaptive-avg-pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), [t(2, 3, 6)], "ab. -> ab."),
    ("adaptive-avg-pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), [t(2, 3, 6, 6)], "ab.. -> ab.."),
    (
        "adaptive-avg-pool3d",
        lambda x: F.adaptive_avg_pool3d(x, 2),
        [t(2, 3, 4, 4, 4)],
        "ab... -> ab...",
    ),
    ("adaptive-max-pool1d", lambda x: F.adaptive_max_pool1d(x, 2), [t(2, 3, 6)], "ab. -> ab."),
    ("adaptive-max-pool2d", lambda x: F.adaptive_max_pool2d(x, 2), [t(2, 3, 6, 6)], "ab.. -> ab.."),
    (
        "adaptive-max-pool3d",
        lambda x: F.adaptive_max_pool3d(x, 2),
        [t(2, 3, 4, 4, 4)],
        "ab... -> ab...",
    ),
    ("lp-pool2d", lambda x: F.lp_pool2d(x, 2, 2), [positive(2, 3, 6, 6)], "ab.. -> ab.."),
    (
        "max-unpool2d",
        lambda x, i: F.max_unpool2d(x, i, 2),
        [t(2, 3, 2, 2), torch.arange(0, 16, 4).reshape(2, 2).expand(2, 3, 2, 2).contiguous()],
        "ab.., ab.. -> ab..",
    ),
    ("nearest1d", lambda x: F.interpolate(x, scale_factor=2), [t(2, 3, 5)], "ab. -> ab."),
    ("nearest2d", lambda x: F.interpolate(x, scale_factor=2), [t(2, 3, 5, 5)], "ab.. -> ab.."),
    (
        "nearest-exact",
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
        [t(2, 3, 5, 5)],
        "ab.. -> ab..",
    ),
    (
        "linear1d",
        lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
        [t(2, 3, 5)],
        "ab. -> ab.",
    ),
    (
        "bilinear2d",
        lambda x: F.interpolate(x, size=(7, 8), mode="bilinear"),
        [t(2, 3, 5, 5)],
        "ab.. -> ab..",
    ),
    (
        "bicubic2d",
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        [t(2, 3, 5, 5)],
        "ab.. -> ab..",
    ),
    (
        "bilinear-antialias",
        lambda x: F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True),
        [t(2, 3, 5, 5)],
        "ab.. -> ab..",
    ),
    (
        "trilinear",
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        [t(2, 3, 3, 3, 3)],
        "ab... -> ab...",
    ),
    (
        "grid-sample",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        [t(2, 3, 5, 5), t(2, 4, 4, 2)],
        "ab.., a... -> ab..",
    ),
    ("pad", lambda x: F.pad(x, (0, 0, 1, 2)), [t(2, 3, 4)], "abc -> a(1+b+d)c"),
    ("pad-value", lambda x: F.pad(x, (1, 0), value=3.0), [t(2, 3, 4)], "abc -> ab(1+c)"),
    ("pad-crop", lambda x: F.pad(x, (-1, 1)), [t(2, 3, 4)], "ab. -> ab."),
    ("pad-reflect", lambda x: F.pad(x, (1, 1), mode="reflect"), [t(2, 3, 4)], "ab. -> ab."),
    (
        "pad-replicate",
        lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
        [t(2, 3, 4, 4)],
        "ab.. -> ab..",
    ),
    ("pad-circular", lambda x: F.pad(x, (1, 1), mode="circular"), [t(2, 3, 4)], "ab. -> ab."),
    ("sum", lambda x: x.sum(1), [t(2, 3, 4)], "abc -> ac"),
    ("mean-all", lambda x: x.mean(), [t(2, 3, 4)], "abc -> "),
    ("mean-keep", lambda x: x.mean((1, 2), keepdim=True), [t(2, 3, 4)], "abc -> a11"),
    ("var-mean", lambda x: torch.var_mean(x, 1), [t(2, 3, 4)], "abc -> ac, ac"),
    ("amax", lambda x: x.amax(1), [t(2, 3, 4)], "abc -> ac"),
    ("logsumexp", lambda x: x.logsumexp(1), [t(2, 3, 4)], "abc -> ac"),
    ("norm", lambda x: torch.linalg.vector_norm(x, dim=1), [t(2, 3, 4)], "abc -> ac"),
    ("linalg-norm", lambda x: torch.linalg.norm(x, dim=1), [t(2, 3, 4)], "abc -> ac"),
    ("linalg-norm-all", lambda x: torch.linalg.norm(x, float("inf")), [t(3, 4)], "ab -> "),
    (
        "matrix-norm",
        lambda x: torch.linalg.matrix_norm(x, "nuc", keepdim=True),
        [t(2, 3, 4)],
        "abc -> a11",
    ),
    ("spectral-norm", lambda x: torch.linalg.norm(x, 2, dim=(0, 2)), [t(2, 3, 4)], "abc -> b"),
    ("log-cumsum-exp", lambda x: x.logcumsumexp(1), [t(3, 6)], "a. -> a."),
    ("max-dim", lambda x: x.max(1), [t(2, 3, 4)], "a.b -> ab, ab"),
    ("max-all", lambda x: x.max(), [t(2, 3, 4)], "abc -> "),
    ("max-two", lambda x, y: torch.max(x, y), [t(2, 3, 4), t(3, 4)], "abc, bc -> abc"),
    ("argmax", lambda x: x.argmax(1), [t(2, 3, 4)], "a.b -> ab"),
    ("softmax", lambda x: x.softmax(1), [t(2, 3, 4)], "abc -> abc"),
    ("log-softmax", lambda x: x.log_softmax(-1), [t(2, 3, 4)], "abc -> abc"),
    ("cdist", lambda x, y: torch.cdist(x, y), [t(2, 3, 4), t(2, 5, 4)], "abc, adc -> abd"),
    (
        "sdpa",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        [t(2, 3, 4, 5), t(2, 3, 6, 5), t(2, 3, 6, 7)],
        "abcd, abed, abef -> abcf",
    ),
    (
        "sdpa-mask",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        [t(2, 3, 4, 5), t(2, 3, 6, 5), t(2, 3, 6, 5), t(3, 4, 6)],
        "abcd, abed, abef, bce -> abcf",
    ),
    (
        "sdpa-causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [t(2, 3, 4, 5), t(2, 3, 4, 5), t(2, 3, 4, 5)],
        "ab.c, ab.c, ab.d -> ab.d",
    ),
    (
        "sdpa-gqa",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [t(2, 6, 4, 5), t(2, 2, 4, 5), t(2, 2, 4, 5)],
        "a(b*c)de, abfe, abfg -> a(b*c)dg",
    ),
    (
        "sdpa-flash",
        lambda q, k, v: A._scaled_dot_product_flash_attention_for_cpu(q, k, v),
        [t(2, 3, 4, 8), t(2, 3, 6, 8), t(2, 3, 6, 8)],
        "abcd, abed, abef -> abcf, abc",
    ),
    (
        "lstm",
        lstm,
        [t(4, 3, 6), t(20, 6), t(20, 5), t(20), t(20), t(20, 6), t(20, 5), t(20), t(20)],
        ".ab, (.*c)b, (.*c)c, (.*c), (.*c), (.*d)b, (.*d)d, (.*d), (.*d) -> .a(c+d), ?a?, ?a?",
    ),
    (
        "lstm-projected",
        projected,
        [t(4, 3, 6), t(20, 6), t(20, 3), t(20), t(20), t(3, 5)],
        ".ab, (.*c)b, (.*c)d, (.*c), (.*c), dc -> .ad, ?a?, ?a?",
    ),
    (
        "gru",
        gru,
        [t(4, 3, 6), t(2, 3, 5), t(15, 6), t(15, 5), t(15, 5), t(15, 5)],
        ".ab, .ac, (.*c)b, (.*c)c, (.*c)c, (.*c)c -> .ac, ?a?",
    ),
    (
        "lstm-cell",
        lambda x, h, c, *w: A.lstm_cell(x, [h, c], *w),
        [t(3, 6), t(3, 5), t(3, 5), t(20, 6), t(20, 5), t(20), t(20)],
        "ab, ac, ac, (.*c)b, (.*c)c, (.*c), (.*c) -> ac, ac",
    ),
    (
        "gru-cell",
        lambda x, h, *w: A.gru_cell(x, h, *w),
        [t(3, 6), t(3, 5), t(15, 6), t(15, 5), t(15), t(15)],
        "ab, ac, (.*c)b, (.*c)c, (.*c), (.*c) -> ac",
    ),
    (
        "gru-cell-without-bias",
        lambda x, h, *w: A.gru_cell(x, h, *w),
        [t(3, 6), t(3, 5), t(15, 6), t(15, 5)],
        "ab, ac, (.*c)b, (.*c)c -> ac",
    ),
    (
        "rnn-cell",
        lambda x, h, *w: A.rnn_tanh_cell(x, h, *w),
        [t(3, 6), t(3, 5), t(5, 6), t(5, 5), t(5), t(5)],
        "ab, ac, (.*c)b, (.*c)c, (.*c), (.*c) -> ac",
    ),
    (
        "rnn-relu-cell",
        lambda x, h, *w: A.rnn_relu_cell(x, h, *w),
        [t(3, 6), t(3, 5), t(5, 6), t(5, 5), t(5), t(5)],
        "ab, ac, (.*c)b, (.*c)c, (.*c), (.*c) -> ac",
    ),
    (
        "affine-grid",
        lambda m: F.affine_grid(m, [2, 3, 4, 5], align_corners=False),
        [t(2, 2, 3)],
        "a.. -> a...",
    ),
    ("fft", lambda x: torch.view_as_real(torch.fft.fft(x, dim=1)), [t(2, 3, 4)], "a.b -> a.b."),
    ("rfft-longer", lambda x: torch.fft.rfft(x, 6, 0).abs(), [t(4, 3)], ".a -> .a"),
    ("irfft", lambda x: torch.fft.irfft(x, 5, 0), [t(3, 4)], ".a -> .a"),
    ("hfft", lambda x: torch.fft.hfft(x, dim=0), [t(3, 4)], ".a -> .a"),
    ("rfft2", lambda x: torch.fft.rfft2(x).abs(), [t(2, 3, 4, 5)], "ab.. -> ab.."),
    ("irfft2", lambda x: torch.fft.irfft2(x, (4, 6), (1, 2)), [t(2, 4, 4, 3)], "a..b -> a..b"),
    ("fftn", lambda x: torch.fft.fftn(x).abs(), [t(2, 3)], ".. -> .."),
    ("fftn-sizes", lambda x: torch.fft.ifftn(x, s=[3]).abs(), [t(2, 3)], "a. -> a."),
    ("fftshift", lambda x: torch.fft.fftshift(x, 1), [t(2, 3, 4)], "a.b -> a.b"),
    (
        "fft-parts",
        lambda x: A._fft_c2r(A._fft_c2c(A._fft_r2c(x, [1], 0, True), [0], 0, True), [1], 0, 5),
        [t(4, 5, 3)],
        "..a -> ..a",
    ),
    ("fft-frequencies", lambda x: x * torch.fft.fftfreq(3), [t(2, 3)], "a. -> a."),
    (
        "complex-view",
        lambda x, y: torch.view_as_real(torch.view_as_complex(x) * torch.complex(y, y)),
        [t(3, 4, 2), t(4)],
        "ab., b -> ab.",
    ),
    (
        "stft",
        lambda x, w: torch.stft(x, 8, window=w, return_complex=True, center=False).abs(),
        [t(3, 20), positive(8)],
        "a., . -> a..",
    ),
    (
        "istft",
        lambda x: torch.istft(x + 0j, 8, window=torch.ones(8, dtype=torch.float64)),
        [t(3, 5, 6)],
        "a.. -> a.",
    ),
    (
        "fake-quantise",
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7),
        [t(2, 3).float()],
        "ab -> ab",
    ),
    (
        "fake-quantise-learned",
        lambda x, s, z: A._fake_quantize_learnable_per_tensor_affine(x, s, z, -8, 7),
        [t(2, 3).float(), torch.tensor([0.1]), torch.tensor([1.0])],
        "ab, 1, 1 -> ab",
    ),
    (
        "fake-quantise-mask",
        lambda x: A.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 0, -8, 7),
        [t(2, 3).float()],
        "ab -> ab, ab",
    ),
    (
        "fake-quantise-channels",
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, 1, -8, 7),
        [t(2, 3, 4).float(), positive(3).float(), t(3).float()],
        "abc, b, b -> abc",
    ),
    (
        "fake-quantise-channels-mask",
        lambda x, s, z: A.fake_quantize_per_channel_affine_cachemask(x, s, z, 0, -8, 7),
        [t(3, 4).float(), positive(3).float(), ids(3, 3).int()],
        "ab, a, a -> ab, ab",
    ),
    (
        "fake-quantise-observed",
        observed(True),
        [t(3, 4).float(), *[torch.rand(3) for _ in range(3)], ids(3, 3).int()],
        "ab, a, a, a, a -> ab, ab, a, a, a, a",
    ),
    (
        "fake-quantise-observed-whole",
        observed(False),
        [t(3, 4).float(), *[torch.rand(1) for _ in range(3)], ids(3, 1).int()],
        "ab, 1, 1, 1, 1 -> ab, ab, 1, 1, 1, 1",
    ),
    ("matrix-exp", torch.linalg.matrix_exp, [t(2, 3, 3)], "abb -> abb"),
    ("matrix-power", lambda x: torch.linalg.matrix_power(x, 3), [t(3, 3)], "aa -> aa"),
    ("inverse", torch.linalg.inv, [t(2, 3, 3)], "abc -> acb"),
    ("qr", torch.linalg.qr, [t(4, 3)], ".. -> .., .."),
    ("svd", torch.linalg.svd, [t(4, 3)], ".. -> .., ., .."),
    (
        "householder",
        torch.linalg.householder_product,
        [t(4, 3), t(3)],
        ".., . -> ..",
    ),
    ("constants", lambda x: x * torch.arange(3) + torch.ones(3), [t(2, 3)], "a. -> a."),
]


# The first of the cases whose names begin alike, such as those of a pooling in one, two and three
# dimensions.
QUICK = {case[0].partition("-")[0]: case[0] for case in reversed(CASES)}


@pytest.mark.quick_cases(*QUICK.values())
@pytest.mark.parametrize(
    ("function", "inputs", "signature"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_rule(function: Callable[..., Any], inputs: list[Tensor], signature: str) -> None:
    replayed = replay(function, *inputs)
    assert replayed.found.warnings == []
    assert replayed.signature() == signature
    errors = replayed.errors()
    assert max(errors.values()) < 1e-9, errors


UNARY = [
    "neg", "clone", "positive", "tanh", "sigmoid", "hardsigmoid", "relu6", "elu", "selu", "celu",
    "mish", "log_sigmoid", "softshrink", "hardshrink", "exp", "expm1", "log", "log2", "log10",
    "log1p", "sqrt", "rsqrt", "square", "reciprocal", "abs", "sign", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "asinh", "atanh", "erf", "erfc", "erfinv", "lgamma", "floor",
    "ceil", "round", "trunc", "frac", "nan_to_num", "isnan", "isfinite", "logical_not", "logit",
    "hardtanh", "sinc", "signbit", "deg2rad", "exp2", "digamma", "i0", "angle",
]  # fmt: skip


@pytest.mark.quick_cases("neg", "abs", "log_sigmoid", "floor", "isnan", "digamma")
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    x = (positive(3, 4) - 0.5).clamp(0.05, 0.95)
    replayed = replay(lambda x: getattr(A, name)(x), x)
    assert replayed.signature() == "ab -> ab"
    assert max(replayed.errors().values()) < 1e-12


PAIRS = [
    "maximum", "minimum", "fmax", "fmin", "eq", "ne", "lt", "le", "gt", "ge", "logical_and",
    "logical_or", "logical_xor", "floor_divide", "remainder", "fmod", "atan2", "hypot",
    "logaddexp", "logaddexp2", "heaviside", "xlogy", "copysign", "float_power", "isclose",
    "add", "sub", "mul", "div", "pow",
]  # fmt: skip


@pytest.mark.quick_cases("add", "maximum", "eq", "floor_divide", "isclose")
@pytest.mark.parametrize("name", PAIRS)
def test_pair(name: str) -> None:
    replayed = replay(lambda x, y: getattr(A, name)(x, y), positive(2, 3, 4), positive(3, 1))
    assert replayed.signature() == "abc, b1 -> abc"
    assert max(replayed.errors().values()) < 1e-12


def test_every_rule_names_an_operator() -> None:
    missing = [name for name in RULES if "::" not in name and not hasattr(A, name)]
    assert missing == []


def test_an_operator_without_a_rule_is_pinned_and_named() -> None:
    replayed = replay(lambda x: torch.linalg.cross(x + 1, x), t(3, 3))
    assert replayed.signature() == ".. -> .."
    (warning,) = replayed.found.warnings
    assert warning.startswith("no rule: linalg_cross; what it reads and writes stays in place")


def test_a_factor_of_a_matrix_stays_and_says_why() -> None:
    replayed = replay(lambda x: torch.linalg.qr(x)[0], t(4, 3))
    reasons = {leaf.reason for label in replayed.outputs[0] for leaf in leaves(label.form)}
    assert reasons == {"linalg_qr depends on the order of rows and columns"}


def test_a_deformable_convolution_says_why_it_is_not_followed() -> None:
    call = Call("torchvision::deform_conv2d", {}, [(1, 3, 5, 5)], log=Log())
    with pytest.raises(ValueError, match="groups of offsets"):
        RULES["torchvision::deform_conv2d"].apply(call)


def test_a_rule_with_an_axis_swapped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(call: Any) -> Any:
        x, weight = call.value("input"), call.value("weight")
        call.unify(x.labels[-1], weight.labels[0])
        return [*x.labels[:-1], weight.labels[1]]

    assert replay(F.linear, t(2, 4), t(4, 4)).errors()["aten.linear.default"] < 1e-12
    monkeypatch.setitem(RULES, "linear", Entry(swapped))
    assert replay(F.linear, t(2, 4), t(4, 4)).errors()["aten.linear.default"] > 1e-2
