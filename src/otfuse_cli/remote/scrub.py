"""Texts of other libraries without the secrets that they may repeat."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

_HIDDEN = "***"
_SHORTEST = 8  # letters; shorter values of variables are words that messages need
_WORD = 3  # letters; a shorter part of a URL would be found in any message
_LONGEST = 300  # letters of a message that is shown
# Variables that hold secrets, of any library.
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|ACCESS_KEY|API_KEY|ACCOUNT_KEY", re.I)
_USER = re.compile(r"(?<=://)[^/\s@]+@")
_QUERY = re.compile(r"(?<=[\w/])\?[\w%.~+-]+=[^\s'\")>]*")
# name=value, "name": "value", Authorization: Bearer value
_PAIR = re.compile(
    r"""((?:secret|token|passw\w*|signature|credential|access[_-]?key(?:[_-]?id)?|api[_-]?key
    |authorization)["']?\s*[=:]\s*["']?)(?:(?:bearer|basic|aws4-hmac-sha256)\s+)?[^\s"',&)}>]+""",
    re.IGNORECASE | re.VERBOSE,
)
# Key ids of Amazon, tokens of Hugging Face, keys of Google.
_SHAPES = re.compile(r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{12,}|hf_[A-Za-z0-9]{16,}|AIza[\w-]{30,})\b")


def scrubbed(text: str, url: str = "") -> str:
    """A text without secrets: of `url`, of the environment, and whatever looks like one."""
    for secret in (*secrets_in(url), *_of_environment()):
        text = text.replace(secret, _HIDDEN)
    text = _USER.sub(f"{_HIDDEN}@", text)
    text = _QUERY.sub(f"?{_HIDDEN}", text)
    text = _PAIR.sub(rf"\1{_HIDDEN}", text)
    text = _SHAPES.sub(_HIDDEN, text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def secrets_in(url: str) -> list[str]:
    """Parts of a URL that nobody else may see: name and password, values of its query."""
    scheme, _, rest = url.partition("://")
    found: list[str] = []
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if at and scheme.lower() != "hf":  # where an @ stands before a revision
        name, _, password = user.partition(":")
        found += [user, name, password]
    query = rest.partition("?")[2]
    found += [query, *(pair.partition("=")[2] for pair in query.split("&"))]
    found += [unquote(text) for text in found]
    return sorted({text for text in found if len(text) > _WORD}, key=len, reverse=True)


def _of_environment() -> list[str]:
    values = {
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST and not os.path.exists(value)
    }
    return sorted(values, key=len, reverse=True)
