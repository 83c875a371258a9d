"""Damaging files at random, the same way for the same seed."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable

# Numbers that sizes and offsets go wrong with.
_ODD = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
# Pieces of formats and of hostile pickles, put where they don't belong.
_TOKENS = (
    *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"\x93", b"R", b"\x81", b"b", b"(", b"t", b"]", b"}"),
    *(b"\x80\x04", b".", b"Q", b"h\x00", b"q\x00", b"K\xff", b"\x8a\x08" + b"\xff" * 8),
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"-1", b"1e99", b"null", b"9" * 30, b"\\ud800"),
    *(b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"F32", b"BF16", b"C64", b"__metadata__"),
)


def mutated(data: bytes, dice: random.Random) -> bytes:
    """The bytes with one to four kinds of damage."""
    for _ in range(dice.randint(1, 4)):
        data = dice.choice(_DAMAGES)(data, dice)
    return data


def mutated_inside(archive: bytes, dice: random.Random) -> bytes:
    """A zip whose pickle is damaged and everything else in order, so that damage gets deep."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for record in old.infolist():
            data = old.read(record)
            if record.filename.endswith("data.pkl"):
                data = mutated(data, dice)
            new.writestr(record.filename, data)
    return out.getvalue()


def mutated_header(data: bytes, dice: random.Random) -> bytes:
    """A safetensors file whose header is damaged, and its length right."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = mutated(data[8:end], dice)
    return len(header).to_bytes(8, "little") + header + data[end:]


def _place(data: bytes, dice: random.Random) -> int:
    # Files are described at their ends.
    edge = min(len(data), 600)
    span = dice.choice([(0, len(data)), (0, edge), (len(data) - edge, len(data))])
    return dice.randint(*span)


def _flip(data: bytes, dice: random.Random) -> bytes:
    at = _place(data, dice)
    return (
        data[:at] + bytes(b ^ (1 << dice.randrange(8)) for b in data[at : at + 1]) + data[at + 1 :]
    )


def _overwrite(data: bytes, dice: random.Random) -> bytes:
    at, size = _place(data, dice), dice.choice([1, 2, 4, 8])
    number = dice.choice(_ODD) & ((1 << (8 * size)) - 1)
    return data[:at] + number.to_bytes(size, "little") + data[at + size :]


def _insert(data: bytes, dice: random.Random) -> bytes:
    at = _place(data, dice)
    return data[:at] + dice.choice(_TOKENS) + data[at:]


def _replace(data: bytes, dice: random.Random) -> bytes:
    at, token = _place(data, dice), dice.choice(_TOKENS)
    return data[:at] + token + data[at + len(token) :]


def _drop(data: bytes, dice: random.Random) -> bytes:
    at = _place(data, dice)
    return data[:at] + data[at + dice.choice([1, 2, 8, 64, 500]) :]


def _double(data: bytes, dice: random.Random) -> bytes:
    at, size = _place(data, dice), dice.choice([1, 8, 64, 500])
    return data[: at + size] + data[at : at + size] + data[at + size :]


def _swap(data: bytes, dice: random.Random) -> bytes:
    one, other = sorted((_place(data, dice), _place(data, dice)))
    size = min(dice.choice([1, 4, 16]), other - one)
    end = other + size
    return (
        data[:one]
        + data[other:end]
        + data[one + size : other]
        + data[one : one + size]
        + data[end:]
    )


def _cut(data: bytes, dice: random.Random) -> bytes:
    return data[: _place(data, dice)]


def _digit(data: bytes, dice: random.Random) -> bytes:
    """Another digit in place of one, where texts have their sizes."""
    places = [at for at, byte in enumerate(data[:4000]) if 48 <= byte <= 57]
    if not places:
        return data
    at = dice.choice(places)
    return data[:at] + str(dice.randrange(10)).encode() + data[at + 1 :]


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_flip, _flip, _overwrite, _overwrite, _insert, _replace, _drop, _double, _swap, _cut),
    *(_digit, _digit),
)
