"""A web server on loopback, its files in memory: by ranges or whole, failing on request."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class WebServer:
    """Files and how they are served.

    Attributes:
        files: Bytes by path, without the first slash.
        ranges: Whether some bytes of a file can be asked for.
        faults: What becomes of the next GETs, each taken once: a status, or `drop`.
        sent: Bytes of all answers to GET.
        gets: How many there were.
        url: Of the server, with a slash at its end.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    faults: list[int | str] = field(default_factory=list)
    sent: int = 0
    gets: int = 0
    url: str = ""


@contextmanager
def serving() -> Iterator[WebServer]:
    """A server with no files yet."""
    web = WebServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            web.gets += 1
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            fault = web.faults.pop(0) if body and web.faults else None
            data = web.files.get(self.path.partition("?")[0].lstrip("/"))
            if isinstance(fault, int) or data is None:
                self.send_error(fault if isinstance(fault, int) else 404)
                return
            tag, asked = f'"{hashlib.md5(data).hexdigest()}"', self.headers.get("Range")
            if asked and web.ranges:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                part = data[int(first) : int(last) + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            else:
                part = data
                self.send_response(200)
            self.send_header("ETag", tag)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if body:
                web.sent += len(part)
                self.wfile.write(part[: len(part) // 2] if fault == "drop" else part)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
