"""`merge` and `prune-fuse` on files, from the command line: contract, endpoints, wrong input."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import otfuse_cli
from nets import TWO_BRANCHES_SPEC, Mlp, TwoBranches, randomise, state
from test_twins import permuted

WIDTHS = (12, 9, 8, 7, 5)


def mlp(seed: int, widths: tuple[int, ...] = WIDTHS) -> dict[str, torch.Tensor]:
    return state(randomise(Mlp(widths), seed))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two MLPs, one of them wrapped."""
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"epoch": 3, "model_state_dict": mlp(0)}, a)
    torch.save({"model_state_dict": {f"module.{k}": v for k, v in mlp(1).items()}}, b)
    return a, b


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_output_loads_where_the_anchor_loaded(cli, pair, tmp_path):
    a, b = pair
    before = digest(a), digest(b)
    done = cli("merge", a, b, "-o", tmp_path / "fused.pt", "--align", "wts")
    assert done.code == 0, done.err
    assert (digest(a), digest(b)) == before
    loaded = torch.load(tmp_path / "fused.pt", weights_only=True)
    assert set(loaded) == {"model_state_dict"}
    assert {k: v.shape for k, v in loaded["model_state_dict"].items()} == {
        f"module.{k}": v.shape for k, v in mlp(1).items()
    }
    report = json.loads((tmp_path / "fused.report.json").read_text())
    assert report["output"][0]["sha256"] == digest(tmp_path / "fused.pt")
    assert [i["sha256"] for i in report["inputs"]] == list(before)


@pytest.mark.quick_cases(".safetensors")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_two_runs_write_the_same_bytes(cli, pair, tmp_path, suffix):
    outs = [tmp_path / f"{name}{suffix}" for name in ("one", "two")]
    for out in outs:
        assert cli("merge", *pair, "-o", out).code == 0
    assert digest(outs[0]) == digest(outs[1])
    reports = [json.loads(o.with_suffix(".report.json").read_text()) for o in outs]
    for report in reports:
        for key in ("timings", "peak_rss_bytes", "output"):
            del report[key]
    assert reports[0] == reports[1]


def test_three_models_with_weights_are_the_weighted_mean_of_aligned_ones(cli, tmp_path):
    models = [mlp(seed) for seed in range(3)]
    paths = [tmp_path / f"{n}.safetensors" for n in "abc"]
    for path, tensors in zip(paths, models, strict=True):
        save_file(tensors, path)
    out = tmp_path / "fused.safetensors"
    done = cli("merge", *paths, "-o", out, "--weights", "0.5,0.3,0.2", "--repair", "none")
    assert done.code == 0, done.err
    fused = load_file(out)
    aligned = [otfuse_cli.merge(m, models[2], weights=(1, 0))[0] for m in models[:2]]
    for name, anchor in models[2].items():
        expected = 0.5 * aligned[0][name] + 0.3 * aligned[1][name] + 0.2 * anchor
        torch.testing.assert_close(fused[name], expected, rtol=1e-5, atol=1e-6)
    report = json.loads(out.with_suffix(".report.json").read_text())
    assert report["recipe"]["weights"] == [0.5, 0.3, 0.2]
    assert {s["source"] for s in report["spaces"]} == {0, 1}


@pytest.mark.slow
def test_weights_are_normalised(pair):
    one, report = otfuse_cli.merge(*map(str, pair), weights=(3, 1))
    two, _ = otfuse_cli.merge(*map(str, pair), weights=(0.75, 0.25))
    assert report.recipe["weights"] == [0.75, 0.25]
    assert all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize("anchor", ["first", "0"])
def test_the_anchor_may_be_the_first(pair, anchor):
    fused, report = otfuse_cli.merge(*map(str, pair), weights=(1, 0), anchor=anchor)
    assert report.recipe["anchor"] == 0
    assert all(torch.equal(fused[n], t) for n, t in mlp(0).items())


def test_weight_zero_is_not_read_beyond_the_header(pair, tmp_path):
    """A NaN in a source that does not count is not seen; its digest is not taken either."""
    broken = mlp(2)
    broken["fc2.weight"][0, 0] = float("nan")
    torch.save(broken, tmp_path / "nan.pt")
    sources = str(tmp_path / "nan.pt"), str(pair[1])
    fused, report = otfuse_cli.merge(*sources, weights=(0, 1))
    assert all(torch.equal(fused[n], t) for n, t in mlp(1).items())
    assert report.inputs[0].sha256 is None
    with pytest.raises(otfuse_cli.OtfuseError, match=r"finite|NaN"):
        otfuse_cli.merge(*sources, weights=(1e-9, 1))


def test_counters_take_the_maximum_and_integers_stay(tmp_path):
    a, b = ({**mlp(s), "fc1.steps": torch.tensor(n)} for s, n in ((0, 5), (1, 7)))
    a["fc1.num_batches_tracked"], b["fc1.num_batches_tracked"] = (
        torch.tensor(70001),
        torch.tensor(9),
    )
    fused, _ = otfuse_cli.merge(a, b)
    assert fused["fc1.num_batches_tracked"] == 70001
    assert fused["fc1.num_batches_tracked"].dtype == torch.int64
    assert fused["fc1.steps"] == 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_anchors_dtype_is_kept_and_equal_values_stay_equal(dtype):
    anchor = {n: t.to(dtype) for n, t in mlp(0).items()}
    fused, _ = otfuse_cli.merge(permuted(anchor, seed=4), anchor)
    assert all(torch.equal(fused[n], t) and fused[n].dtype == dtype for n, t in anchor.items())


@pytest.mark.slow
def test_dtype_option(cli, pair, tmp_path):
    out = tmp_path / "fused.safetensors"
    assert cli("merge", *pair, "-o", out, "--dtype", "float16").code == 0
    assert {t.dtype for t in load_file(out).values()} == {torch.float16}


def test_an_overflow_in_the_stored_dtype_is_an_error(cli, tmp_path):
    big = {n: t * 1e5 for n, t in mlp(0).items()}
    save_file(big, tmp_path / "a.safetensors")
    save_file(big, tmp_path / "b.safetensors")
    out = tmp_path / "fused.safetensors"
    done = cli("merge", *tmp_path.glob("?.safetensors"), "-o", out, "--dtype", "float16")
    assert done.code == 5
    assert "fc1" in done.err
    assert not out.exists()


def test_a_hand_written_spec_fuses_a_net_that_no_family_knows(cli, tmp_path):
    tensors = state(randomise(TwoBranches(), 0))
    spec = tmp_path / "net.yaml"
    spec.write_text(TWO_BRANCHES_SPEC)
    save_file(permuted(tensors, seed=2, arch=str(spec)), tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "b.safetensors")
    out = tmp_path / "fused.safetensors"
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    done = cli("merge", *paths, "-o", out, "--arch", spec)
    assert done.code == 0, done.err
    assert all(torch.equal(load_file(out)[n], t) for n, t in tensors.items())
    spec.write_text(TWO_BRANCHES_SPEC.replace("b * 4", "b * 3"))
    done = cli("merge", *paths, "-o", tmp_path / "other.safetensors", "--arch", spec)
    assert done.code == 4
    assert "head.weight" in done.err
    assert "axis 1" in done.err


def test_prune_fuse_writes_beside_the_pruned_net(cli, tmp_path):
    save_file(mlp(0), tmp_path / "dense.safetensors")
    narrow = mlp(0, (12, 5, 4, 3, 5))
    torch.save(narrow, tmp_path / "pruned.pt")
    done = cli("prune-fuse", tmp_path / "dense.safetensors", tmp_path / "pruned.pt")
    assert done.code == 0, done.err
    assert "pruned.fused.pt" in done.out
    fused = torch.load(tmp_path / "pruned.fused.pt", weights_only=True)
    assert {n: t.shape for n, t in fused.items()} == {n: t.shape for n, t in narrow.items()}
    report = json.loads((tmp_path / "pruned.fused.report.json").read_text())
    assert report["command"] == "prune-fuse"
    assert report["spaces"][0]["sizes"] == [9, 5]
    assert report["spaces"][0]["moved_fraction"] is None


def _nan(tensors):
    tensors["fc3.weight"][1, 2] = float("nan")
    return tensors


class _Runs:
    def __reduce__(self):
        return os.system, ("true",)


def _prepare_wrong(kind: str, folder: Path) -> tuple[list[object], int, list[str]]:
    """Command line, exit code and words of the message for one kind of wrong input."""
    a, b, out = folder / "a.pt", folder / "b.pt", folder / "out.pt"
    torch.save(mlp(0), a)
    torch.save(mlp(1), b)
    line: list[object] = ["merge", a, b, "-o", out]
    match kind:
        case "missing file":
            a.unlink()
            return line, 3, ["a.pt"]
        case "empty file":
            a.write_bytes(b"")
            return line, 3, ["a.pt", "empty"]
        case "lfs pointer":
            a.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
            return line, 3, ["a.pt", "LFS"]
        case "pickle that runs code":
            a.write_bytes(pickle.dumps({"fc1.weight": _Runs()}))
            return line, 3, ["a.pt", "system"]
        case "other keys":
            torch.save({**mlp(0), "fc9.weight": torch.ones(3)}, a)
            return line, 4, ["fc9.weight", "a.pt", "b.pt"]
        case "other classes":
            torch.save(mlp(0, (*WIDTHS[:-1], 12)), a)
            return line, 4, ["fc4", "12", "5", "--vocab"]
        case "nan":
            torch.save(_nan(mlp(0)), a)
            return line, 3, ["a.pt", "fc3.weight"]
        case "unknown architecture":
            torch.save({"strange.weight": torch.ones(3, 3)}, a)
            torch.save({"strange.weight": torch.ones(3, 3)}, b)
            return line, 4, ["unknown architecture", "--arch"]
        case "output exists":
            out.write_text("mine")
            return line, 6, ["out.pt", "--overwrite"]
        case "report exists":
            (folder / "out.report.json").write_text("mine")
            return line, 6, ["out.report.json"]
        case "output is an input":
            return [*line[:-1], b, "--overwrite"], 6, ["b.pt", "input"]
        case "zero weights":
            return [*line, "--weights", "0,0"], 2, ["--weights", "zero"]
        case "weights of another number":
            return [*line, "--weights", "1,1,1"], 2, ["3 weights", "2 checkpoints"]
        case "nan weights":
            return [*line, "--weights", "nan,1"], 2, ["--weights"]
        case "one checkpoint":
            return ["merge", a, "-o", out], 2, ["checkpoint"]
        case "no such anchor":
            return [*line, "--anchor", "7"], 2, ["--anchor 7"]
        case "unknown suffix":
            return [*line[:-1], folder / "out.onnx"], 2, [".onnx"]
        case "missing folder":
            return [*line[:-1], folder / "no" / "out.pt"], 6, ["no"]
        case "unknown option value":
            return [*line, "--metric", "manhattan"], 2, ["manhattan", "euclidean"]
        case "no cuda":
            return [*line, "--device", "cuda"], 2, ["--device cuda"]
    raise AssertionError(kind)


WRONG = [
    "missing file",
    "empty file",
    "lfs pointer",
    "pickle that runs code",
    "other keys",
    "other classes",
    "nan",
    "unknown architecture",
    "output exists",
    "report exists",
    "output is an input",
    "zero weights",
    "weights of another number",
    "nan weights",
    "one checkpoint",
    "no such anchor",
    "unknown suffix",
    "missing folder",
    "unknown option value",
    "no cuda",
]


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_input_gets_one_clear_error_and_leaves_nothing(cli, tmp_path, kind):
    if kind == "no cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    line, code, words = _prepare_wrong(kind, tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    done = cli(*line)
    assert done.code == code, done.err
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_a_killed_run_leaves_no_output(tmp_path):
    """Killed while its second tensor is due: nothing under the output's name, nothing beside it."""
    torch.save(mlp(0), tmp_path / "a.pt")
    torch.save(mlp(1), tmp_path / "b.pt")
    program = (
        "import sys, time\n"
        "import otfuse_cli.fusion.row_blocks as m\n"
        "real, calls = m.stored, []\n"
        "def slow(*a, **k):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 2:\n"
        "        print('halfway', flush=True)\n"
        "        time.sleep(60)\n"
        "    return real(*a, **k)\n"
        "m.stored = slow\n"
        "from otfuse_cli.cli.app import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    out = tmp_path / "fused.safetensors"
    line = ["merge", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "-o", str(out)]
    with subprocess.Popen(
        [sys.executable, "-c", program, *line], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "halfway\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    time.sleep(0.1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "b.pt"]


def test_different_widths_have_no_plain_average(cli, pair, tmp_path):
    torch.save(mlp(0, (12, 11, 8, 7, 5)), pair[0])
    done = cli("merge", *pair, "-o", tmp_path / "f.pt", "--align", "none")
    assert done.code == 4
    assert "11 units" in done.err
    assert not (tmp_path / "f.pt").exists()


def test_inspect_compares_identity_with_transport(cli, pair):
    done = cli("inspect", *pair, "--ot-costs", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)["report"]
    assert [layer["name"] for layer in report["layers"]] == ["fc1", "fc2", "fc3", "fc4"]
    assert all(s["ot_cost"] <= s["identity_cost"] for s in report["spaces"])
    assert report["layers"][-1]["diagonal_mass"] is not None
    gated = cli("inspect", *pair, "--ot-costs", "--max-cost", "0.001")
    assert gated.code == 7


def test_inspect_describes_a_file_of_unknown_architecture(cli, tmp_path):
    torch.save({"strange.weight": torch.ones(3, 3)}, tmp_path / "a.pt")
    done = cli("inspect", tmp_path / "a.pt", "--json")
    assert done.code == 0
    report = json.loads(done.out)["report"]
    assert report["graph"] is None
    assert "no layer graph" in report["warnings"][0]


def test_align_takes_two_layers():
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(9, 4, generator=generator)
    order = torch.randperm(9, generator=generator)
    found = otfuse_cli.align(anchor[order], anchor)
    assert torch.equal(found.weight, anchor)
    assert torch.equal(found.map.produce(torch.arange(9.0)[order], 0), torch.arange(9.0))
    assert found.ot_cost < 1e-6 < found.identity_cost
    with pytest.raises(otfuse_cli.OtfuseError, match="fit together"):
        otfuse_cli.align(anchor, anchor[:, :3])
