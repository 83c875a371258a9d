"""Samples: read from every source, drawn by seed, checked against what the network takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from otfuse_cli.errors import UnreadableInput, UsageError
from otfuse_cli.running.factory import Network, build
from otfuse_cli.running.inputs import slots, static_batch, vocabularies
from otfuse_cli.running.samples import Samples, load_samples


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.places = nn.Embedding(16, 4)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.words(input_ids) + self.places(place)
        return x if attention_mask is None else x * attention_mask[..., None]


class Pair(nn.Module):
    def forward(self, left, right):
        return left + right


def image_net():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Network("net.py:image", module, (torch.rand(2, 3, 8, 8),))


def vector_net(width=12):
    return Network("mlp", nn.Sequential(nn.Linear(width, 3)), (torch.zeros(2, width),))


def text_net(**more):
    ids = torch.zeros(2, 5, dtype=torch.long)
    return Network("net.py:text", Text(), (), {"input_ids": ids, **more})


def images(n=10, size=8):
    return np.random.default_rng(0).standard_normal((n, 3, size, size)).astype(np.float32)


def sources(tmp_path, x, y):
    np.savez(tmp_path / "s.npz", x=x, y=y)
    np.savez(tmp_path / "named.npz", inputs=x, labels=y)
    np.save(tmp_path / "s.npy", x)
    save_file({"x": torch.tensor(x), "y": torch.tensor(y)}, tmp_path / "s.safetensors")
    torch.save({"x": torch.tensor(x), "y": torch.tensor(y)}, tmp_path / "s.pt")
    (tmp_path / "load.py").write_text(
        "import numpy as np, pathlib\n"
        "data = dict(np.load(pathlib.Path(__file__).with_name('s.npz')))\n"
        "def pair(): return data['x'], data['y']\n"
        "def alone(): return data['x']\n"
        "def names(): return {'x': data['x'], 'labels': data['y']}\n"
        "def wrong(): return [1]\n"
        "def fails(): raise ValueError('no data today')\n"
    )
    files = ("s.npz", "named.npz", "s.safetensors", "s.pt", "load.py:pair", "load.py:names")
    return [str(tmp_path / f) for f in files], [
        str(tmp_path / f) for f in ("s.npy", "load.py:alone")
    ]


def test_every_source_gives_the_same_samples(tmp_path):
    x, y = images(), np.arange(10) % 3
    labelled, bare = sources(tmp_path, x, y)
    for source in [*labelled, *bare, {"x": x}, x, torch.tensor(x), (x, y)]:
        found = load_samples(source, image_net())
        assert torch.equal(found.args[0], torch.tensor(x)), source
        assert found.count == 10
        assert not found.kwargs
    for source in labelled:
        assert load_samples(source, image_net()).labels.tolist() == y.tolist()


def test_the_draw_depends_on_the_seed_alone():
    x, y = images(50), np.arange(50)
    one = load_samples({"x": x, "y": y}, image_net(), number=20, seed=3)
    again = load_samples({"y": y, "x": x.astype(np.float64)}, image_net(), number=20, seed=3)
    other = load_samples({"x": x, "y": y}, image_net(), number=20, seed=4)
    assert one.labels.tolist() == again.labels.tolist() != other.labels.tolist()
    assert len(set(one.labels.tolist())) == 20
    assert torch.equal(one.args[0], torch.tensor(x)[one.labels])
    assert load_samples({"x": x, "y": y}, image_net()).labels.tolist() == y.tolist()


@pytest.mark.parametrize("number", [50, 51, 99, 400, 10_000])
def test_a_file_sorted_by_class_is_not_split_by_class(number):
    """Fusions hold out the last fifth of their inputs, and judge on the first ones."""
    x, y = images(50), np.repeat(np.arange(5), 10)
    found = load_samples({"x": x, "y": y}, image_net(), number=number, seed=1)
    assert sorted(found.labels.tolist()) == y.tolist()
    assert len(set(found.labels[-10:].tolist())) > 2
    assert len(set(found.labels[:10].tolist())) > 2


def test_take_and_batches():
    samples = Samples((torch.arange(7)[:, None],), {"k": torch.arange(7)}, torch.arange(7))
    assert [b.count for b in samples.batches(3)] == [3, 3, 1]
    assert torch.cat([b.args[0] for b in samples.batches(3)]).flatten().tolist() == list(range(7))
    few = samples.take([4, 1])
    assert (
        few.args[0].flatten().tolist() == few.kwargs["k"].tolist() == few.labels.tolist() == [4, 1]
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ">f4"])
def test_floats_of_any_width_are_computed_in_float32(dtype):
    x = images().astype(dtype)
    found = load_samples(x, image_net()).args[0]
    assert found.dtype is torch.float32
    assert torch.equal(found, torch.tensor(x.astype(np.float32)))


def test_vectors_take_images_and_one_channel_images_take_vectors():
    x = np.arange(24, dtype=np.float32).reshape(2, 1, 3, 4)
    plane = Network("f", nn.Conv2d(1, 1, 1), (torch.rand(2, 1, 3, 4),))
    for given in (x, x[:, 0], x.reshape(2, 12)):
        assert load_samples(given, vector_net()).args[0].tolist() == x.reshape(2, 12).tolist()
        assert load_samples(given, plane).args[0].tolist() == x.tolist()


def test_another_size_passes_where_the_network_runs_on_it(tmp_path):
    assert load_samples(images(4, 16), image_net()).args[0].shape == (4, 3, 16, 16)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    with pytest.raises(UsageError, match="wrong shape"):
        load_samples(images(4, 16), Network("f", module, (torch.rand(2, 3, 8, 8),)))
    program = Network("g.pt2", image_net().module, (torch.rand(2, 3, 8, 8),))
    with pytest.raises(UsageError, match="wrong shape"):
        load_samples(images(4, 16), program)


def test_tokens_with_mask_by_name():
    ids, mask = np.arange(28).reshape(4, 7) % 11, np.ones((4, 7), np.int32)
    found = load_samples({"input_ids": ids, "attention_mask": mask, "y": ids}, text_net())
    assert found.args == ()
    assert found.kwargs["input_ids"].dtype is torch.int64
    assert found.kwargs["attention_mask"].tolist() == mask.tolist()
    assert found.labels.shape == (4, 7)
    needs = text_net(attention_mask=torch.ones(2, 5, dtype=torch.long))
    assert load_samples(ids, needs).kwargs["attention_mask"].tolist() == mask.tolist()
    assert [s.name for s in slots(needs)] == ["input_ids", "attention_mask"]
    assert vocabularies(needs) == {"input_ids": 11}


def test_vocabulary_of_an_exported_program():
    ids = torch.zeros(2, 5, dtype=torch.long)
    program = torch.export.export(Text(), (), {"input_ids": ids}, strict=False)
    module = program.module(check_guards=False)
    network = Network("g.pt2", module, *program.example_inputs)
    assert vocabularies(network) == {"input_ids": 11}
    assert static_batch(network) == 2
    assert static_batch(text_net()) is None


def test_a_network_without_values_is_built_again_where_its_forward_looks_at_them(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.words = nn.Embedding(11, 4)\n"
        "    def forward(self, ids):\n"
        "        return self.words(ids) * (2 if bool((ids > 5).all()) else 1)\n"
        "def net(): return Net(), torch.zeros(2, 5, dtype=torch.long)\n"
    )
    network = build(f"{tmp_path}/net.py:net", device="meta")
    assert vocabularies(network) == {"ids": 11}
    assert load_samples(np.ones((4, 7), np.int64), network).args[0].shape == (4, 7)


def test_several_inputs_go_by_name():
    pair = Network("f", Pair(), (torch.rand(2, 3), torch.rand(2, 3)))
    a, b = np.ones((4, 3), np.float32), np.zeros((4, 3), np.float32)
    found = load_samples({"right": b, "left": a}, pair)
    assert [t.mean().item() for t in found.args] == [1, 0]
    with pytest.raises(UsageError, match="no inputs for right") as caught:
        load_samples(a, pair)
    assert "x" in caught.value.where


def refused(error, source, network, *words, **options):
    with pytest.raises(error) as caught:
        load_samples(source, network, **options)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_wrong_inputs_say_what_is_wrong():
    x, net = images(), image_net()
    refused(
        UsageError,
        x.transpose(0, 2, 3, 1),
        net,
        "wrong shape",
        "[10, 8, 8, 3]",
        "[n, 3, 8, 8]",
        "x.transpose(0, 3, 1, 2)",
    )
    refused(UsageError, x.reshape(10, -1), net, "wrong shape", "reshape the vectors yourself")
    refused(UsageError, x[:, 0], net, "wrong shape", "[10, 8, 8]")
    refused(UsageError, (x * 50).astype(np.uint8), net, "raw pixels", "uint8", "/ 255")
    refused(UsageError, x.astype(np.int64), net, "integers", "int64")
    refused(UsageError, np.ones((3, 5)), text_net(), "real numbers", "float64", "int64")
    refused(UsageError, np.full((3, 5), 11), text_net(), "vocabulary", "11 rows")
    refused(UsageError, np.full((3, 5), -1), text_net(), "vocabulary", "from -1")
    refused(UsageError, {"z": x}, net, "no inputs for input", "holds z")
    refused(UsageError, x[:0], net, "no samples")
    refused(UsageError, x, net, "at least one", number=0)
    refused(UsageError, [1], net, "got a list")
    refused(UnreadableInput, {"x": np.array([["a"]])}, net, "not numbers")


def test_not_a_number_names_the_sample_in_the_file():
    x = images(20)
    x[13, 1, 2, 3] = np.nan
    refused(UnreadableInput, x, image_net(), "sample 13", "1 of 20")
    x[:] = np.inf
    x[13] = np.nan
    order = torch.randperm(20, generator=torch.Generator().manual_seed(5))
    refused(UnreadableInput, x, image_net(), f"sample {int(order[0])}", number=3, seed=5)


def test_labels_are_class_indices():
    x, net = images(), image_net()
    refused(UsageError, (x, np.arange(9)), net, "different length", "[10, 3, 8, 8]", "[9]")
    refused(UsageError, (x, np.eye(10)), net, "class indices", "argmax")
    refused(UsageError, (x, np.arange(10) - 1), net, "negative", "-1")
    refused(UsageError, x, net, "without labels", need_labels=True)


def test_wrong_files(tmp_path):
    net = image_net()
    sources(tmp_path, images(), np.arange(10))
    refused(UnreadableInput, tmp_path / "none.npz", net, "no such file")
    refused(UsageError, tmp_path / "s.csv", net, "format", ".csv")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04")
    refused(UnreadableInput, tmp_path / "broken.npz", net, "can't be read")
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    refused(UnreadableInput, tmp_path / "objects.npy", net, "can't be read", "Python objects")
    np.savez(tmp_path / "objects.npz", x=np.array([{}]))
    refused(UnreadableInput, tmp_path / "objects.npz", net, "can't be read", "allow_pickle")
    refused(UsageError, f"{tmp_path}/load.py:none", net, "no such loader", "--samples")
    refused(UsageError, f"{tmp_path}/load.py:wrong", net, "got a list")
    refused(UnreadableInput, f"{tmp_path}/load.py:fails", net, "loader failed", "no data today")
    refused(UnreadableInput, f"{tmp_path}/none.py:f", net, "no such file", "--samples")
