"""Checkpoints of a hub, `hf://`: a server on loopback that knows what reading a file asks."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # in a process of its own: the library reads its endpoint once
pytest.importorskip("huggingface_hub")

OTFUSE = "import sys; from otfuse_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"
TOKEN = "hf_" + "t0ken" * 6


class Hub(BaseHTTPRequestHandler):
    """One repository, `org/model`, with the files of the server; private."""

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        files: dict[str, bytes] = self.server.files  # type: ignore[attr-defined]
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        place = self.path.partition("?")[0]
        name = place.rpartition("/")[2]
        if TOKEN not in self.headers.get("Authorization", ""):
            self._say(401, b"{}")
        elif place.startswith("/org/model/resolve/") and name in files:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            self._say(206, files[name][int(first) : int(last) + 1])
        elif "/tree/" in place:
            self._tell(_entries(files))
        elif place.startswith("/api/models/org/model"):
            self._tell({"id": "org/model", "sha": "1" * 40, "siblings": []})
        else:
            self._say(404, b"{}")

    def do_POST(self) -> None:
        files: dict[str, bytes] = self.server.files  # type: ignore[attr-defined]
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._tell([entry for entry in _entries(files) if entry["path"] in asked])

    def _tell(self, value: Any) -> None:
        self._say(200, json.dumps(value).encode())

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entries(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """The files, as a hub describes them."""
    return [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in files.items()
    ]


@pytest.fixture
def hub(demo_pair: tuple[Path, Path]) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files = {path.name: path.read_bytes() for path in demo_pair}
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def run(hub: Any, *line: object, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    more = {"HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", OTFUSE, "merge", *map(str, line)]
    environment = {**os.environ, **more}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_checkpoints_of_a_hub(hub: Any, demo_pair: tuple[Path, Path], tmp_path: Path) -> None:
    there = ("hf://org/model@main/a.safetensors", "hf://org/model/b.safetensors")
    done = run(hub, *there, "-o", tmp_path / "there.pt", "-q")
    assert done.returncode == 0, done.stderr
    assert run(hub, *demo_pair, "-o", tmp_path / "here.pt", "-q").returncode == 0
    assert (tmp_path / "there.pt").read_bytes() == (tmp_path / "here.pt").read_bytes()
    report = json.loads((tmp_path / "there.report.json").read_text())
    assert [record["path"] for record in report["inputs"]] == list(there)
    assert any("/resolve/main/a.safetensors" in path for path in hub.asked)


def test_a_hub_that_says_no(hub: Any, tmp_path: Path) -> None:
    url, wrong = "hf://org/model/a.safetensors", "hf_" + "wr0ng" * 6
    done = run(hub, url, url, "-o", tmp_path / "f.pt", "--debug", token=wrong)
    assert done.returncode == 3, done.stderr
    assert wrong not in done.stdout + done.stderr
    missing = "hf://org/model/none.safetensors"
    done = run(hub, url, missing, "-o", tmp_path / "f.pt")
    assert done.returncode == 3
    assert f"where: {missing}" in done.stderr
