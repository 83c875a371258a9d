"""Synthetic inputs: what they look like in numbers, which network gets which, same by seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from nets import state
from otfuse_cli.errors import UsageError
from otfuse_cli.graph.spec.from_shapes import layer_graph
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.running.dead_leaves import CORRELATION, dead_leaves, smooth_noise
from otfuse_cli.running.factory import Network
from otfuse_cli.running.synthetic import first_layer_names, synthetic_samples
from test_samples import image_net, text_net, vector_net


@pytest.mark.quick_cases("noise-1-28-28", "noise-4-9-40", "leaves-4-9-40")
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 28, 28), (4, 9, 40)])
@pytest.mark.parametrize("kind", ["leaves", "noise"])
def test_images_are_standardised_and_the_same_by_seed(kind, channels, height, width):
    def draw(seed):
        if kind == "leaves":
            return dead_leaves(100, channels, height, width, seed)
        return smooth_noise(100, channels, (height, width), seed)

    x = draw(0)
    assert x.shape == (100, channels, height, width)
    assert x.dtype == np.float32
    np.testing.assert_allclose(x.mean((0, 2, 3)), 0, atol=1e-4)
    np.testing.assert_allclose(x.std((0, 2, 3)), 1, atol=1e-4)
    np.testing.assert_array_equal(x, draw(0))
    assert np.abs(x - draw(1)).max() > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["leaves", "noise"])
def test_power_falls_with_frequency_as_in_photographs(kind):
    drawn = (
        dead_leaves(300, 1, 64, 64, 0) if kind == "leaves" else smooth_noise(300, 1, (64, 64), 0)
    )
    power = (np.abs(np.fft.fft2(drawn[:, 0])) ** 2).mean(0)[0, 1:17]
    slope = np.polyfit(np.log(np.arange(1, 17)), np.log(power), 1)[0]
    assert -2.6 < slope < -1.6  # photographs: about -2


@pytest.mark.slow
def test_leaves_are_flat_shapes_with_edges_of_many_sizes():
    x = dead_leaves(200, 3, 64, 64, 0)
    flat = (np.abs(np.diff(x, axis=3)).max(1) == 0).mean()
    assert 0.6 < flat < 0.95  # most neighbours lie on one leaf
    colours = [len(np.unique(image.reshape(3, -1), axis=1).T) for image in x[:20]]
    assert min(colours) > 15
    _, sizes = np.unique(x[0].reshape(3, -1), axis=1, return_counts=True)
    assert sizes.max() > 20 * np.median(sizes)
    channels = np.corrcoef(x.transpose(1, 0, 2, 3).reshape(3, -1))
    assert CORRELATION - 0.05 < channels[0, 1] < CORRELATION + 0.1


def test_images_for_image_networks():
    net = image_net()
    found = synthetic_samples(net, number=20, seed=1)
    assert found.args[0].shape == (20, 3, 8, 8)
    assert found.labels is None
    same = synthetic_samples(net, number=20, seed=1)
    assert torch.equal(found.args[0], same.args[0])
    larger = synthetic_samples(net, number=4, input_shape=(3, 16, 16), kind="noise")
    assert larger.args[0].shape == (4, 3, 16, 16)
    with pytest.raises(UsageError, match="wrong shape"):
        synthetic_samples(net, number=4, input_shape=(1, 16, 16))


def test_vectors_are_mixtures_of_rows_at_unit_rms():
    weights = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    parents = {"a": weights, "b": weights[:2] * 7}
    x = synthetic_samples(vector_net(), parents, number=400).args[0]
    assert x.shape == (400, 12)
    assert torch.allclose(x.square().mean(1), torch.ones(400), atol=1e-5)
    assert torch.linalg.matrix_rank(x) == 5
    unit = weights / weights.square().mean(1, keepdim=True).sqrt()
    alone = (torch.cdist(x, unit) < 1e-3).any(1)
    assert 60 < int(alone.sum()) < 140  # a quarter are rows as they are
    again = synthetic_samples(vector_net(), parents, number=400, seed=1).args[0]
    assert not torch.equal(x, again)


def test_vectors_without_rows_are_white_noise_and_with_a_shape_images():
    white = synthetic_samples(vector_net(), number=500).args[0]
    assert abs(float(white.std()) - 1) < 0.05
    net = vector_net(64)
    rows = {"a": torch.rand(3, 64)}
    pictures = synthetic_samples(net, rows, number=50, input_shape=(1, 8, 8)).args[0]
    assert pictures.shape == (50, 64)
    assert np.array_equal(pictures.numpy(), dead_leaves(50, 1, 8, 8, 0).reshape(50, 64))


def test_kinds_can_be_mixed():
    net = image_net()
    both = synthetic_samples(net, number=40, kind="leaves+noise").args[0]
    flat = (both.diff(dim=3).abs().amax(1) == 0).float().mean((1, 2)) > 0.2
    assert int(flat.sum()) == 20
    assert not bool(flat[:20].all())


def test_tokens_are_even_below_the_vocabulary():
    net = text_net(
        attention_mask=torch.ones(2, 5, dtype=torch.long),
        token_type_ids=torch.zeros(2, 5, dtype=torch.long),
    )
    found = synthetic_samples(net, number=200).kwargs
    assert found["input_ids"].dtype is torch.int64
    assert sorted(found["input_ids"].unique().tolist()) == list(range(11))
    assert bool((found["attention_mask"] == 1).all())
    assert not bool(found["token_type_ids"].any())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "clouds"}, ["clouds", "leaves"]),
        ({"kind": "rows"}, ["rows", "[3, 8, 8]"]),
        ({"kind": "tokens"}, ["tokens are integers"]),
        ({"number": 0}, ["--num-samples 0"]),
    ],
)
def test_what_does_not_fit_is_refused(options, words):
    with pytest.raises(UsageError) as caught:
        synthetic_samples(image_net(), **{"number": 5, **options})
    for word in words:
        assert word in str(caught.value)


def test_integers_that_no_embedding_reads_are_refused():
    class Hash(nn.Module):
        def forward(self, ids):
            return torch.nn.functional.one_hot(ids, 4).float()

    net = Network("f", Hash(), (torch.zeros(2, 3, dtype=torch.long),))
    with pytest.raises(UsageError, match="no vocabulary"):
        synthetic_samples(net, number=3)


def test_first_layers_are_found_in_every_kind_of_graph():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3, padding=1)
            self.short = nn.Conv2d(3, 6, 1)
            self.next = nn.Conv2d(4, 6, 3, padding=1)

        def forward(self, x):
            return self.next(self.stem(x).relu()) + self.short(x)

    graph = trace(Split(), (torch.rand(2, 3, 8, 8),))
    assert first_layer_names(graph) == ("stem.weight", "short.weight")
    mlp = nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
    shapes = {n: tuple(t.shape) for n, t in state(mlp).items()}
    assert first_layer_names(layer_graph("mlp", shapes)) == ("0.weight",)
