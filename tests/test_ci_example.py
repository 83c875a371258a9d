"""The pipeline of docs/ci.md: the script runs on the bundled pair, the workflow is sound."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import ROOT
from test_report_schema import REPORT

SCRIPT = ROOT / "examples" / "ci" / "pipeline.sh"
WORKFLOW = ROOT / "examples" / "ci" / "workflow.yml"


@pytest.fixture
def pipeline(demo_pair, tmp_path):
    """Run the script on the bundled pair, with this otfuse and this Python."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, line in (("otfuse", "-m otfuse_cli.cli.app"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {line} "$@"\n')
        program.chmod(0o755)
    source = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": f"{programs}:{os.environ['PATH']}",
    }

    def run(*arguments, **settings):
        line = ["bash", SCRIPT, *(arguments or (*demo_pair, tmp_path / "result"))]
        environment = {**os.environ, **source, **settings}
        return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.slow
def test_pipeline_from_merge_to_upload(pipeline, tmp_path):
    upload = tmp_path / "upload.sh"
    upload.write_text(f'#!/bin/sh\nls "$1" > "{tmp_path}/uploaded"\n')
    upload.chmod(0o755)
    run = pipeline(UPLOAD=str(upload))
    assert run.returncode == 0, run.stderr
    files = ["costs.html", "fused.report.json", "fused.safetensors", "scores.txt"]
    assert (tmp_path / "uploaded").read_text().split() == files
    REPORT.validate(json.loads((tmp_path / "result" / "fused.report.json").read_text()))
    scores = re.fullmatch(r"accuracy ([\d.]+)\n", (tmp_path / "result" / "scores.txt").read_text())
    assert float(scores.group(1)) > 90
    assert run.stdout == (tmp_path / "result" / "scores.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "code", "last"),
    [
        ({"MAX_COST": "0.9"}, 7, "gate"),
        ({"MAX_MOVED": "0.1"}, 7, "gate"),
        ({"MAX_COST": "much"}, 2, "gate"),
        ({"EVALUATE": "false"}, 1, "evaluate"),
    ],
)
def test_whatever_says_no_ends_it_before_the_upload(pipeline, tmp_path, settings, code, last):
    run = pipeline(UPLOAD=f"touch {tmp_path}/uploaded", **settings)
    assert run.returncode == code
    assert re.findall(r"^== (\w+)", run.stderr, re.M)[-1] == last
    assert not (tmp_path / "uploaded").exists()
    assert (tmp_path / "result" / "fused.report.json").exists()


@pytest.mark.slow
def test_missing_checkpoint_ends_it_before_the_merge(pipeline, demo_pair, tmp_path):
    run = pipeline(tmp_path / "missing.pt", demo_pair[1], tmp_path / "result")
    assert run.returncode == 3
    assert "== merge" not in run.stderr


def test_wrong_number_of_arguments(pipeline):
    run = pipeline("a.pt")
    assert run.returncode == 2
    assert run.stderr.startswith("usage:")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck():
    subprocess.run(["shellcheck", SCRIPT], check=True)


def test_workflow():
    workflow = yaml.safe_load(WORKFLOW.read_text())
    inputs = workflow[True]["workflow_dispatch"]["inputs"]  # YAML 1.1 reads `on` as true
    (job,) = workflow["jobs"].values()
    used = set(re.findall(r"inputs\.(\w+)", json.dumps(job)))
    assert used == set(inputs)
    for step in job["steps"]:
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    script = next(line.split()[0] for line in lines if "pipeline.sh" in line)
    assert os.access(ROOT / script, os.X_OK)
    environment = {name for name in job["env"] if name not in {"NO_COLOR", "A", "B"}}
    assert environment <= set(re.findall(r"^#   (\w+) ", SCRIPT.read_text(), re.M))
    for line in lines:  # bash must be able to read each step
        assert "${{" not in line, "inputs go through the environment: no one may inject commands"
    for step in job["steps"]:
        if "run" in step:
            subprocess.run(["bash", "-n", "-c", step["run"]], check=True)


def test_docs_name_every_setting():
    text = (ROOT / "docs" / "ci.md").read_text()
    assert {"EVALUATE", "UPLOAD", "MAX_COST"} <= set(re.findall(r"[A-Z_]{6,}", text))
    for target in re.findall(r"\]\((\.\./[^)#]+|[\w-]+\.md)\)", text):
        assert (ROOT / "docs" / Path(target)).exists(), target
