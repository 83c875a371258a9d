"""Row blocks, digests on the way, spaces taken one producer at a time, predicted memory."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file

import otfuse_cli
from otfuse_cli.checkpoint.digest import Trail
from otfuse_cli.checkpoint.disk import Disk
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.commands.merge import run_merge
from otfuse_cli.errors import UsageError
from otfuse_cli.fusion import row_blocks
from otfuse_cli.graph.axes import Fixed, Prod, Unit
from otfuse_cli.matching import large_space
from otfuse_cli.matching.unfold import unfold
from otfuse_cli.requests.requests import MergeRequest


def net(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A chain of three layers with biases, some units dead."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (6, 12, 9, 4)
    found = {}
    for at, (k, n) in enumerate(pairwise(sizes), 1):
        found[f"fc{at}.weight"] = torch.randn(n, k, generator=generator).to(dtype)
        found[f"fc{at}.bias"] = torch.randn(n, generator=generator).to(dtype)
    found["fc1.weight"][3], found["fc1.bias"][3] = 0, 0
    return found


@pytest.mark.quick_cases("whole sources-dtype0", "whole sources-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("at_once", [0, 1 << 26], ids=["picked rows", "whole sources"])
def test_the_size_of_blocks_does_not_show(monkeypatch, dtype, at_once):
    models = [net(seed, dtype) for seed in range(3)]
    usual, _ = otfuse_cli.merge(*models, matcher="sweep", repair="none")
    monkeypatch.setattr(row_blocks, "_BLOCK", 10)
    monkeypatch.setattr(row_blocks, "_AT_ONCE", at_once)
    small, _ = otfuse_cli.merge(*models, matcher="sweep", repair="none")
    assert all(torch.equal(usual[n], small[n]) for n in usual)


def test_output_layers_get_one_factor_whatever_the_blocks(monkeypatch):
    models = [net(0), net(1)]
    usual, _ = otfuse_cli.merge(*models, matcher="sweep")
    plain, _ = otfuse_cli.merge(*models, matcher="sweep", repair="none")
    monkeypatch.setattr(row_blocks, "_BLOCK", 10)
    small, _ = otfuse_cli.merge(*models, matcher="sweep")
    assert not torch.allclose(usual["fc3.weight"], plain["fc3.weight"], rtol=1e-3)
    for name, tensor in usual.items():
        torch.testing.assert_close(small[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_files_come_out_as_tensors_do(tmp_path, monkeypatch):
    monkeypatch.setattr(row_blocks, "_BLOCK", 10)
    paths = [tmp_path / f"{at}.safetensors" for at in range(2)]
    for at, path in enumerate(paths):
        save_file(net(at, torch.float16), path)
    in_memory, _ = otfuse_cli.merge(*paths)
    for name in ("out.safetensors", "out.pt"):
        otfuse_cli.merge(*paths, output=tmp_path / name, overwrite=True)
        with open_checkpoint(tmp_path / name) as written:
            for key, tensor in in_memory.items():
                assert torch.equal(written.read(key), tensor)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_digests_are_those_of_the_files(tmp_path, suffix):
    paths = [tmp_path / f"{at}{suffix}" for at in range(2)]
    for at, path in enumerate(paths):
        (save_file if suffix == ".safetensors" else torch.save)(net(at), path)
    out = tmp_path / f"out{suffix}"
    _, report = otfuse_cli.merge(*paths, output=out)
    for record, path in zip([*report.inputs, *report.output], [*paths, out], strict=True):
        assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_output_is_hashed_as_it_is_written(tmp_path, monkeypatch):
    paths = [tmp_path / f"{at}.safetensors" for at in range(2)]
    for at, path in enumerate(paths):
        save_file(net(at), path)
    request = MergeRequest(checkpoints=tuple(paths), output=tmp_path / "out.safetensors")
    read = []
    fill = Disk._fill
    monkeypatch.setattr(
        Disk,
        "_fill",
        lambda self, part, start: (read.append((self.path.name, start)), fill(self, part, start)),
    )
    (record,) = run_merge(request).output
    written = request.output.read_bytes()
    assert record.sha256 == hashlib.sha256(written).hexdigest()
    again = [start for name, start in read if name == "out.safetensors"]
    first = 8 + int.from_bytes(written[:8], "little")
    assert again  # its header, to be sure that it can be read
    assert max(again) < first


def test_a_trail_takes_bytes_in_order_only():
    trail, data = Trail(), bytes(range(100))
    for first, last in ((0, 30), (50, 60), (10, 40), (0, 20), (40, 100)):
        trail.saw(memoryview(data)[first:last], first)
    assert trail.position == 100
    assert trail.hexdigest() == hashlib.sha256(data).hexdigest()


def test_rows_of_a_stored_tensor(tmp_path):
    tensors = {"a": torch.randn(7, 3, 2), "b": torch.randn(4)}
    save_file(tensors, tmp_path / "x.safetensors")
    torch.save({n: t.transpose(0, -1) for n, t in tensors.items()}, tmp_path / "x.pt")
    for name in ("x.safetensors", "x.pt"):
        with open_checkpoint(tmp_path / name) as checkpoint:
            for key in tensors:
                assert torch.equal(checkpoint.read_rows(key, 1, 2), checkpoint.read(key)[1:2])


@pytest.mark.parametrize("metric", ["euclidean"])
@pytest.mark.parametrize("unit_norm", [True, False])
def test_a_large_space_is_matched_like_any_other(monkeypatch, metric, unit_norm):
    models = [net(0), net(1)]
    options = {"matcher": "sweep", "metric": metric, "unit_norm": unit_norm}
    usual, before = otfuse_cli.merge(*models, **options)
    monkeypatch.setattr(large_space, "LARGE_BYTES", 0)
    large, after = otfuse_cli.merge(*models, **options)
    assert all(torch.equal(usual[n], large[n]) for n in usual)
    for old, new in zip(before.spaces, after.spaces, strict=True):
        assert (new.id, new.tensors, new.solver) == (old.id, old.tensors, old.solver)
        assert new.ot_cost == pytest.approx(old.ot_cost, rel=1e-6)
        assert new.identity_cost == pytest.approx(old.identity_cost, rel=1e-6)
    for old, new in zip(before.layers, after.layers, strict=True):
        assert new.name == old.name
        assert new.ot_cost == pytest.approx(old.ot_cost, rel=1e-6)
        assert new.identity_cost == pytest.approx(old.identity_cost, rel=1e-6)


def test_more_memory_than_allowed_is_refused(tmp_path):
    with pytest.raises(UsageError, match="more memory") as caught:
        otfuse_cli.merge(net(0), net(1), max_memory=0.1, output=tmp_path / "out.safetensors")
    assert "units (fc" in caught.value.where
    assert not list(tmp_path.iterdir())
    otfuse_cli.merge(net(0), net(1), max_memory=1.0, matcher="sweep")


def test_one_unit_has_one_order():
    """A space of one unit is not pooled though its map is unknown: nothing about it is open."""
    tensor = torch.randn(6, 4)
    exprs = [Prod((Unit("kv"), Unit("g"))), Fixed(4)]
    (found,) = unfold(tensor, exprs, 0, "kv", {"kv": 6, "g": 1}, pool=frozenset({"g"}))
    assert torch.equal(found, tensor)
    (pooled,) = unfold(tensor, exprs, 0, "kv", {"kv": 3, "g": 2}, pool=frozenset({"g"}))
    pairs = tensor.view(3, 2, 4)
    wanted = torch.stack([pairs.mean(1), pairs.square().mean(1)], -1).flatten(1)
    torch.testing.assert_close(pooled, wanted)
