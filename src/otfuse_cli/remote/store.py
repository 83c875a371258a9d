"""What stores are asked: what lies where, some of its bytes, all of them. By fsspec, with retries.

Credentials are fsspec's business and that of the libraries below it: their own environment
variables and files. Nothing of fsspec is imported before a URL is looked at.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..errors import UsageError
from .scrub import scrubbed

Value = TypeVar("Value")

# Seconds before each further try: what a store that sheds load asks for, and no user's patience.
DELAYS = (0.2, 0.8, 3.2)
_EXTRA = 'pip install "otfuse-cli[remote]"'
# The libraries that fsspec needs for a scheme, and that no extra of ours has.
_LIBRARIES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs"}
# Of HTTP: what goes away by itself. 403 and 404 don't.
_PASSING = frozenset((408, 425, 429, 500, 502, 503, 504))
# What libraries call an answer that breaks off.
_CUT = ("ClientPayloadError", "IncompleteRead", "IncompleteReadError", "ResponseStreamingError")
# What says which version of an object it is, whatever the store calls it.
_MARKS = ("ETag", "etag", "VersionId", "generation", "md5Hash", "blob_id", "sha", "oid")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created")


class Address(Protocol):
    """Where something lies; as text it holds no secret."""

    url: str

    @property
    def scheme(self) -> str:
        """What comes before `://`."""


class RemoteFailure(OSError):
    """A store that doesn't answer, or says no. Its text holds no secret.

    Attributes:
        passing: Whether trying again may help.
        cut: Whether an answer came, and broke off.
    """

    def __init__(
        self, text: str, *, passing: bool = False, cut: bool = False, number: int = errno.EIO
    ) -> None:
        super().__init__(number, text)
        self.passing = passing
        self.cut = cut


@dataclass(frozen=True)
class Standing:
    """What lies at a place.

    Attributes:
        folder: Whether it is one.
        size: In bytes; None where the store doesn't say.
        ranges: Whether some of its bytes can be asked for.
        version: What changes with its contents; empty where nothing says.
    """

    folder: bool
    size: int | None
    ranges: bool
    version: tuple[str, ...]


def look_at(path: Address) -> Standing:
    """What lies at a place.

    Raises:
        FileNotFoundError: Nothing.
        RemoteFailure: The store doesn't say.
        UsageError: A library is missing, or nobody reads such URLs.
    """
    store, inner = store_of(path)
    # The hub's file system remembers what it saw, whatever it is told of listings.
    fresh = {"refresh": True} if path.scheme == "hf" else {}
    info: Mapping[str, Any] = tried(path, lambda: store.info(inner, **fresh))
    size = info.get("size")
    version = [f"{key} {info[key]}" for key in _MARKS if info.get(key)]
    # Times are kept in seconds; they count where there is nothing better.
    version = version or [f"{key} {info[key]}" for key in _TIMES if info.get(key)]
    return Standing(
        folder=info.get("type") == "directory",
        size=None if size is None else int(size),
        ranges=info.get("partial", True) is not False and bool(size),
        version=(*version, f"{size} bytes") if version else (),
    )


def takes_ranges(path: Address, found: Standing) -> bool:
    """Whether some bytes of a file can be asked for; web servers are tried, few say so.

    Raises:
        FileNotFoundError: It is gone.
        RemoteFailure: The server doesn't answer.
    """
    size = found.size
    if not found.ranges or size is None or not path.scheme.startswith("http") or size < 2:
        return found.ranges
    store, inner = store_of(path)

    def second_byte() -> bool:
        with store.open(inner, "rb", cache_type="none", size=size) as file:
            file.seek(1)
            try:
                return len(file.read(1)) == 1
            except ValueError:  # the whole file came
                return False

    return tried(path, second_byte)


def holds_files(path: Address) -> bool:
    """Whether anything lies inside.

    Raises:
        RemoteFailure: The store doesn't say.
        UsageError: A library is missing, or nobody reads such URLs.
    """
    try:
        return look_at(path).folder
    except FileNotFoundError:
        return False


def listing(path: Address) -> list[tuple[str, bool]]:
    """Names of what lies inside, sorted, and whether each is a folder.

    Raises:
        FileNotFoundError: There is no such folder.
        RemoteFailure: The store doesn't say.
    """
    store, inner = store_of(path)
    entries = tried(path, lambda: store.ls(inner, detail=True))
    inside = {
        entry["name"].rstrip("/").rpartition("/")[2]: entry.get("type") == "directory"
        for entry in entries
        # A store may list the mark of the folder itself.
        if entry["name"].strip("/") != inner.strip("/")
    }
    return sorted(inside.items())


def fetch(path: Address, start: int, end: int) -> bytes:
    """Bytes from `start` to before `end`; more where the store doesn't know ranges.

    Raises:
        FileNotFoundError: It is gone.
        RemoteFailure: The store doesn't answer, or with fewer bytes, after all retries.
    """
    store, inner = store_of(path)

    def once() -> bytes:
        more = {} if store.async_impl else {"cache_type": "none"}
        data: bytes = store.cat_file(inner, start=start, end=end, **more)
        if len(data) < end - start:
            text = f"{len(data)} of {end - start} bytes came"
            raise RemoteFailure(text, passing=True, cut=True)
        return data

    return tried(path, once)


def fetch_all(path: Address) -> bytes:
    """All bytes of a small file.

    Raises:
        FileNotFoundError: There is none.
        RemoteFailure: The store doesn't answer, after all retries.
    """
    store, inner = store_of(path)
    return tried(path, lambda: bytes(store.cat_file(inner)))


def download(path: Address, file: Any) -> None:
    """Write all bytes into a file that is open, from its beginning.

    Raises:
        FileNotFoundError: There is none.
        RemoteFailure: The store doesn't answer, after all retries.
    """
    store, inner = store_of(path)

    def once() -> None:
        file.seek(0)
        file.truncate()
        store.get_file(inner, file)

    tried(path, once)


def remove(path: Address) -> None:
    """Delete a file.

    Raises:
        RemoteFailure: The store says no.
    """
    store, inner = store_of(path)
    tried(path, lambda: store.rm_file(inner))


def copy_inside(path: Address, other: Address) -> None:
    """Copy a file inside its store.

    Raises:
        RemoteFailure: The store says no.
    """
    store, inner = store_of(path)
    tried(path, lambda: store.cp_file(inner, store_of(other)[1]))


def tried(path: Address, action: Callable[[], Value]) -> Value:
    """What comes of an action, which is tried again where that may help.

    Raises:
        FileNotFoundError: Nothing is there.
        RemoteFailure: It failed for good.
        UsageError: A library is missing.
    """
    for number, delay in enumerate(DELAYS):
        try:
            return told(path, action)
        except RemoteFailure as failure:
            # These libraries try each request again themselves, but not the reading of an answer.
            enough = number and path.scheme in _LIBRARIES and not failure.cut
            if not failure.passing or enough:
                raise
        time.sleep(delay)
    return told(path, action)


def told(path: Address, action: Callable[[], Value]) -> Value:
    """What comes of an action of a library, tried once.

    Raises:
        FileNotFoundError: Nothing is there.
        RemoteFailure: It failed. The library's error, which may hold a secret, is not its cause.
        UsageError: A library is missing.
    """
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - libraries raise whatever they like
        failure = _failure(path, error)
    raise failure


def store_of(path: Address, **options: Any) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the name in it. `options` are fsspec's.

    Raises:
        UsageError: A library is missing, or nobody reads such URLs.
        RemoteFailure: The library can't be set up.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise _missing(path, "fsspec", _EXTRA) from error
    if path.scheme == "hf":
        _require_hub(path)
    # Listings are never kept: an object that changes has to be seen.
    store, inner = told(path, lambda: url_to_fs(path.url, use_listings_cache=False, **options))
    if path.scheme in ("s3", "s3a") and not options:
        store.retries = 1  # botocore's, which users configure, below it and ours above are enough
    return store, inner


def _require_hub(path: Address) -> None:
    from importlib.util import find_spec

    if find_spec("huggingface_hub") is None:
        raise _missing(path, "huggingface_hub", _EXTRA)


def _failure(path: Address, error: Exception) -> Exception:
    """What an error of a library amounts to, in words without secrets."""
    if isinstance(error, RemoteFailure | UsageError):
        return error
    if isinstance(error, ImportError):
        library = _LIBRARIES.get(path.scheme)
        fix = _EXTRA if library is None else f"pip install {library}"
        return _missing(path, library or "a library", fix)
    if isinstance(error, ValueError) and "rotocol not known" in str(error):
        return UsageError(
            "nobody reads such URLs",
            where=str(path),
            why=f"{path.scheme}:// is no scheme that fsspec knows",
            fix="use a path, s3://, gs://, https:// or hf://",
        )
    cause = _root(error)
    if isinstance(cause, FileNotFoundError) or _status(cause) in (404, 410):
        return FileNotFoundError(errno.ENOENT, "nothing is there", str(path))
    text = scrubbed(str(cause).strip().partition("\n")[0], path.url)
    text = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    denied = isinstance(cause, PermissionError) or _status(cause) in (401, 403)
    number = errno.EACCES if denied else errno.EIO
    cut = any(kind.__name__ in _CUT for kind in type(cause).__mro__)
    return RemoteFailure(text, passing=not denied and _passes(cause), cut=cut, number=number)


def _root(error: BaseException) -> BaseException:
    """What is behind an error: fsspec calls any failure of a web server a missing file."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause is not None and _status(cause) != 404:
        return cause if not isinstance(cause, FileNotFoundError) else error
    return error


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error carries; None for none."""
    for name in ("status", "status_code", "code"):
        number = getattr(error, name, None)
        if isinstance(number, int):
            return number
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore's
        number = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return number if isinstance(number, int) else None
    number = getattr(response, "status_code", None)
    return number if isinstance(number, int) else None


def _passes(error: BaseException) -> bool:
    """Whether an error may go away by itself: of networks and busy servers, not of requests."""
    status = _status(error)
    if status is not None:
        return status in _PASSING
    if isinstance(error, NotADirectoryError | IsADirectoryError | ValueError | NotImplementedError):
        return False
    # Broken connections come as OSError, TimeoutError or errors of aiohttp and urllib3; missing
    # credentials are an error of botocore's own.
    named = {kind.__name__ for kind in type(error).__mro__}
    return (
        isinstance(error, OSError)
        or bool(named & set(_CUT))
        or bool(
            named
            & {"ClientError", "ConnectionError", "HTTPError", "HTTPClientError", "TransportError"}
        )
    )


def _missing(path: Address, library: str, fix: str) -> UsageError:
    return UsageError(
        f"{path.scheme}:// needs {library}, which is not installed", where=str(path), fix=fix
    )
