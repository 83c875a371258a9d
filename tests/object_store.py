"""An object store on loopback that counts, fails on request and knows one key: moto, filtered.

As a program it serves; `serving` starts it and is what tests and benchmarks talk to.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

KEY = "AKIAOTFUSETEST000001"
SECRET = "wJalrXUtnFEMI-otfuse-test-secret"
BUCKET = "models"
_CONTROL = "/-otfuse-"
_WAIT = 4.0  # seconds


@dataclass(frozen=True)
class ObjectStore:
    """A store that runs.

    Attributes:
        url: Of its endpoint.
        pid: Of its process.
    """

    url: str
    pid: int

    def environment(self, secret: str = SECRET, key: str = KEY) -> dict[str, str]:
        """What its clients find in their environment."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def counts(self) -> dict[str, int]:
        """Requests by method, bytes sent and taken, since the last time it was asked."""
        return self._ask(b"")

    def fail(self, *faults: str) -> None:
        """The next requests that match fail, once each: `500 GET`, `drop GET`, `500 PUT`.

        `wait PUT` is answered rightly, seconds later.
        """
        self._ask(json.dumps(faults).encode())

    def unfinished(self) -> int:
        """How many uploads have been begun and neither completed nor aborted."""
        return self._ask(b"unfinished")["unfinished"]

    def _ask(self, data: bytes) -> dict[str, int]:
        request = urllib.request.Request(self.url + _CONTROL, data=data, method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, int] = json.load(answer)
        return found


@contextmanager
def serving() -> Iterator[ObjectStore]:
    """A store in a process of its own, with one bucket."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield ObjectStore(process.stdout.readline().strip(), process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class _Filter:
    """Counts what passes, and fails where it was told to."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._faults: list[str] = []

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == _CONTROL:
            return self._control(environ, start)
        method = environ["REQUEST_METHOD"]
        key = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
        if key != KEY:
            text = f"<AWSAccessKeyId>{key}</AWSAccessKeyId><Code>InvalidAccessKeyId</Code>"
            start("403 Forbidden", [("Content-Type", "application/xml")])
            told = f"<Error>{text}<Message>The key {key} is none</Message></Error>"
            return [] if method == "HEAD" else [told.encode()]
        fault = self._fault(method)
        self._count(method, 1)
        if method == "PUT":
            self._count("taken", int(environ.get("CONTENT_LENGTH") or 0))
        if fault == "wait":
            time.sleep(_WAIT)
        if fault == "500":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("500 Internal Server Error", [("Content-Type", "application/xml")])
            told = "<Error><Code>InternalError</Code><Message>try again</Message></Error>"
            return [] if method == "HEAD" else [told.encode()]
        body = _part(environ, start)
        if body is None:
            body = b"".join(self._inner(environ, start))
        if fault == "drop":
            return _broken(body)
        if method == "HEAD":
            return []
        if method == "GET":
            self._count("sent", len(body))
        return [body]

    def _fault(self, method: str) -> str | None:
        with self._lock:
            for fault in self._faults:
                kind, _, wanted = fault.partition(" ")
                if wanted == method:
                    self._faults.remove(fault)
                    return kind
        return None

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + number

    def _control(self, environ: dict[str, Any], start: Any) -> list[bytes]:
        asked = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            answer, self._counts = self._counts, {}
            if asked == b"unfinished":
                answer = {"unfinished": _unfinished()}
            elif asked:
                self._faults = json.loads(asked)
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]


def _part(environ: dict[str, Any], start: Any) -> bytes | None:
    """What a GET of a range asks for; moto would copy the whole object for each."""
    _, _, asked = environ.get("HTTP_RANGE", "").partition("bytes=")
    first, _, last = asked.partition("-")
    bucket, _, name = environ["PATH_INFO"].lstrip("/").partition("/")
    if environ["REQUEST_METHOD"] != "GET" or not (first and last):
        return None
    found = _backend().buckets[bucket].keys.get(name)
    if found is None:
        return None
    with found.lock:
        found._value_buffer.seek(int(first))
        body: bytes = found._value_buffer.read(int(last) + 1 - int(first))
    given = f"bytes {first}-{int(first) + len(body) - 1}/{found.size}"
    headers = [("Content-Range", given), ("ETag", found.etag), ("Content-Length", str(len(body)))]
    start("206 Partial Content", headers)
    return body


def _broken(body: bytes) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    raise ConnectionAbortedError("dropped on request")


def _unfinished() -> int:
    return sum(len(bucket.multiparts) for bucket in _backend().buckets.values())


def _backend() -> Any:
    from moto.s3.models import s3_backends

    return s3_backends["123456789012"]["aws"]


def _serve() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").disabled = True
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    application = _Filter(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signed = f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request"
    request = urllib.request.Request(
        f"{url}/{BUCKET}", method="PUT", headers={"Authorization": signed}
    )
    with urllib.request.urlopen(request, timeout=30):
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    _serve()
