"""Example inputs of diffusers' modules, told by their configs and forward passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from otfuse_cli.errors import IncompatibleModels
from otfuse_cli.running.example_inputs import example_inputs

CONFIG = {"_diffusers_version": "0.42", "in_channels": 4, "sample_size": 8}


class Unet(nn.Module):
    def __init__(self, **config) -> None:
        super().__init__()
        self.config = {**CONFIG, **config}
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.time, self.words = nn.Embedding(9, 4), nn.Linear(6, 4)

    def forward(self, sample, timestep, encoder_hidden_states, class_labels=None, scale=1.0):
        told = self.time(timestep) + self.words(encoder_hidden_states).mean(1)
        return self.conv(sample) * scale + told[:, :, None, None]


def test_what_the_forward_pass_takes_is_given():
    net = Unet(cross_attention_dim=6)
    args, given = example_inputs(net, None, "net", "cpu")
    assert args == ()
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    assert shapes == {
        "sample": (2, 4, 8, 8),
        "timestep": (2,),
        "encoder_hidden_states": (2, 5, 6),
    }
    assert net(**given).shape == (2, 4, 8, 8)


@pytest.mark.parametrize(("side", "shape"), [(None, (32, 32)), ([8, 12], (8, 12))])
def test_sizes_of_images(side, shape):
    _, given = example_inputs(Unet(cross_attention_dim=6, sample_size=side), None, "net", "cpu")
    assert given["sample"].shape[2:] == torch.Size(shape)


def test_classes_where_the_network_has_some():
    net = Unet(cross_attention_dim=6, num_class_embeds=3)
    _, given = example_inputs(net, None, "net", "cpu")
    assert given["class_labels"].tolist() == [0, 0]


def test_what_is_not_known_is_asked_for():
    with pytest.raises(IncompatibleModels, match="no example inputs"):
        example_inputs(Unet(), None, "net", "cpu")  # how wide its words are isn't said
