"""What a collective is about, in a few words: named in errors and compared between ranks,
so that ranks which do other things at the same time do not take each other's data.
"""

from __future__ import annotations

import hashlib

SIZE = 47  # bytes, as accel.h says
_HASHED = 10  # of them, of a hash where the words are longer
WORDS = 6  # of 64 bits, in which a label travels


def encoded(label: str) -> bytes:
    """`label` as UTF-8 of at most SIZE bytes. Of a longer one the beginning, and a hash of
    all of it."""
    data = label.replace("\0", " ").encode("utf-8", "replace")
    if len(data) <= SIZE:
        return data
    digest = hashlib.blake2b(data, digest_size=4).hexdigest()
    start = data[: SIZE - _HASHED].decode("utf-8", "ignore")
    return f"{start}~#{digest}".encode()


def packed(label: str) -> list[int]:
    """The label as WORDS numbers."""
    data = encoded(label).ljust(8 * WORDS, b"\0")
    return [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]


def unpacked(numbers: list[int]) -> str:
    """The reverse of packed()."""
    data = b"".join(n.to_bytes(8, "little", signed=True) for n in numbers)
    return data.rstrip(b"\0").decode("utf-8", "replace")
