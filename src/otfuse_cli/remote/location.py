"""Names of files: paths of this machine, and URLs that behave like paths.

A URL is no path to `pathlib`, which would make one slash of two. `location` tells them apart, and a
`RemotePath` answers what the package asks of paths. Its text never holds a secret; its `url` may.
Imports nothing heavy.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path, PurePath
from stat import S_IFDIR, S_IFREG
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ..errors import UnreadableInput

_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
# The name and password before a host.
_USER = re.compile(r"^[^/@]*@")
_HIDDEN = "***"
NO_ACCESS = "check the URL, and the credentials that the store's own library finds"
_WEB = ("http", "https")
_HUB = "hf"  # whose @ stands before a revision

if TYPE_CHECKING:
    _Base = Path
else:
    _Base = type(Path())  # before 3.12 only the class of the system can be extended


def location(text: str | os.PathLike[str]) -> Path:
    """The file that a text names: a path of this machine, or a `RemotePath` for a URL."""
    if isinstance(text, RemotePath):
        return text
    if not isinstance(text, str):
        return Path(text)
    match = _SCHEME.fullmatch(text)
    if match is None:
        return Path(text)
    if match["scheme"].lower() == "file":
        return Path(unquote(urlsplit(text).path))
    return RemotePath(text)


def is_remote(path: object) -> bool:
    """Whether a path is a URL."""
    return isinstance(path, RemotePath)


class RemotePath(_Base):
    """A URL that answers like a path: names, what lies there, its bytes.

    Attributes:
        url: The URL as given, for the library that opens it; it may hold secrets.
    """

    url: str
    _folder: bool | None

    def __new__(cls, url: str, *, folder: bool | None = None) -> RemotePath:
        """The URL, and whether it is known to be a folder, or a file."""
        scheme, rest = _split(url)
        self = super().__new__(cls, _stand_in(scheme, rest))
        self.url = url
        self._folder = folder
        return self

    def __init__(self, url: str, *, folder: bool | None = None) -> None:
        if sys.version_info >= (3, 12):
            super().__init__(_stand_in(*_split(url)))

    @property
    def scheme(self) -> str:
        """What comes before `://`, in lower case."""
        return _split(self.url)[0]

    @property
    def _plain(self) -> str:
        """The URL without a query, and without a slash at the end."""
        scheme, rest = _split(self.url)
        return f"{scheme}://{_without_query(scheme, rest).rstrip('/')}"

    @property
    def name(self) -> str:
        """The last part; empty for a bucket or host alone."""
        rest = self._plain.partition("://")[2]
        return rest.rpartition("/")[2] if "/" in rest else ""

    @property
    def parent(self) -> RemotePath:
        """The folder that it lies in; a bucket or host lies in itself."""
        plain = self._plain
        return RemotePath(plain.rpartition("/")[0] if self.name else plain)

    @property
    def parents(self) -> tuple[RemotePath, ...]:
        """The folders that it lies in, inside out."""
        around = [self.parent] if self.name else []
        while around and around[-1].name:
            around.append(around[-1].parent)
        return tuple(around)

    def with_name(self, name: str) -> RemotePath:
        """Another file of the same folder."""
        return self.parent / name

    def with_suffix(self, suffix: str) -> RemotePath:
        """The same name with another suffix."""
        return self.with_name(self.name.removesuffix(self.suffix) + suffix)

    def __truediv__(self, key: str | os.PathLike[str]) -> RemotePath:
        return RemotePath(f"{self._plain}/{PurePath(key).as_posix()}")

    def joinpath(self, *parts: str | os.PathLike[str]) -> RemotePath:
        """What lies inside."""
        path = self
        for part in parts:
            path = path / part
        return path

    def resolve(self, strict: bool = False) -> RemotePath:
        """Itself: stores have no links."""
        return self

    def is_absolute(self) -> bool:
        """Yes."""
        return True

    def is_symlink(self) -> bool:
        """No: stores have no links."""
        return False

    def is_dir(self, **_: Any) -> bool:
        """Whether anything lies inside; False as well where the store won't say.

        Raises:
            UnreadableInput: The store doesn't answer.
        """
        if self._folder is not None:
            return self._folder
        if self.scheme in _WEB:
            return False  # a page is not a folder, and lists nothing that could be relied on
        from .store import RemoteFailure, holds_files

        try:
            return holds_files(self)
        except RemoteFailure as error:
            if not error.passing:
                return False
            raise UnreadableInput(
                "can't read from the store", where=str(self), why=error.strerror, fix=NO_ACCESS
            ) from error

    def is_file(self, **_: Any) -> bool:
        """Whether it can be read; False as well where nobody can say."""
        if self._folder is not None:
            return not self._folder
        from .store import RemoteFailure, look_at

        try:
            return not look_at(self).folder
        except (RemoteFailure, FileNotFoundError):
            return False

    def exists(self, **_: Any) -> bool:
        """Whether it is a file or a folder; False as well where nobody can say."""
        return self.is_file() or self.is_dir()

    def stat(self, **_: Any) -> os.stat_result:
        """Kind and size; everything else is zero.

        Raises:
            OSError: There is none, or it can't be looked at.
        """
        from .store import look_at

        found = look_at(self)
        kind = S_IFDIR if found.folder else S_IFREG
        return os.stat_result((kind | 0o444, 0, 0, 1, 0, 0, found.size or 0, 0, 0, 0))

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]
        """What lies inside; nothing on the web, where folders can't be listed.

        Raises:
            OSError: It can't be listed.
        """
        if self.scheme in _WEB:
            return
        from .store import listing

        for name, folder in listing(self):
            yield RemotePath(f"{self._plain}/{name}", folder=folder)

    def read_bytes(self) -> bytes:
        """All bytes.

        Raises:
            OSError: There is none, or it can't be read.
        """
        from .store import fetch_all

        return fetch_all(self)

    def read_text(self, encoding: str | None = None, errors: str | None = None, **_: Any) -> str:
        """All bytes as text.

        Raises:
            OSError: There is none, or it can't be read.
            UnicodeDecodeError: It is no text.
        """
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(self, mode: str = "r", *_: Any, **__: Any) -> IO[Any]:  # type: ignore[override]
        """Its bytes as a file; only for reading them (`rb`), and only for what fits into memory.

        Raises:
            OSError: There is none, or it can't be read.
        """
        if mode != "rb":
            raise ValueError(f"a remote file is opened with mode rb, not {mode}")
        return BytesIO(self.read_bytes())

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is no path of this machine")

    def __str__(self) -> str:
        scheme, rest = _split(self.url)
        plain = _without_query(scheme, rest)
        shown = plain if scheme == _HUB else _USER.sub(f"{_HIDDEN}@", plain)
        return f"{scheme}://{shown}" + (f"?{_HIDDEN}" if plain != rest else "")

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._plain == other._plain

    def __hash__(self) -> int:
        return hash(self._plain)

    def __lt__(self, other: object) -> bool:
        return str(self) < str(other)

    def __reduce__(self) -> Any:
        return RemotePath, (self.url,)


def _split(url: str) -> tuple[str, str]:
    match = _SCHEME.fullmatch(url)
    if match is None:
        raise ValueError("no URL")
    return match["scheme"].lower(), match["rest"]


def _without_query(scheme: str, rest: str) -> str:
    """What comes before a query; in keys of stores a question mark alone is a letter."""
    if scheme in _WEB:
        return rest.partition("#")[0].partition("?")[0]
    return rest.partition("?versionId=")[0]


def _stand_in(scheme: str, rest: str) -> str:
    """What the base class is told: no path that exists, with the parts of the URL."""
    return f"/{scheme}:/{_USER.sub('', _without_query(scheme, rest))}"
