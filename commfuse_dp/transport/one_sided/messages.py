"""Control messages of the one-sided protocol: their kinds and their bytes.

Every message is one fixed little-endian header of 40 bytes: the kind, four 32-bit fields a..d, two 64-bit fields x, y.

| kind    | a       | b     | c       | d    | x      | y      | then follow                                  |
|---------|---------|-------|---------|------|--------|--------|----------------------------------------------|
| PUBLISH |         | epoch |         |      |        | length | y bytes: the keys, 32 bits each              |
| FINISH  | flags   | epoch | scatters| calls| sent   |        |                                              |
| DEPOSIT | channel | key   | seq     | part | offset | nbytes | y bytes, unless memory is directly mapped    |
| CREDIT  | round   |       |         |      | offset |        |                                              |
| PULL    | key     | epoch | request |      | start  | nbytes |                                              |
| DATA    |         |       | request |      |        | nbytes | y bytes                                      |
| ABORT   | culprit |       |         |      |        | length | y bytes of UTF-8 text                        |
| GOODBYE |         |       |         |      |        |        |                                              |
| BROKEN  | flags   | epoch |         |      | sent   | length | y bytes of UTF-8 text                        |
| ROUND   | number  | begun |         |      | sent   |        |                                              |

`sent`: deposits that the sender has made for the receiver so far. `round`, ROUND: see recovery.py. Flags of BROKEN: 1 final,
2 absent. PULL and DATA occur only where peers cannot map each other's memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

HEADER = struct.Struct("<5I4xQQ")
HEADER_BYTES = HEADER.size

PUBLISH, FINISH, DEPOSIT, CREDIT, PULL, DATA, ABORT, GOODBYE, BROKEN, ROUND = range(10)
WITH_TEXT = (PUBLISH, ABORT, BROKEN)  # more bytes belong to the message itself
KIND_NAMES = ("publish", "finish", "deposit", "credit", "pull", "data", "abort", "goodbye", "broken", "round")

MAX_TEXT = 2000  # longest reason of an ABORT or a BROKEN, in bytes


def pack(kind: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0, x: int = 0, y: int = 0) -> bytes:
    """One header. Raises ValueError if a field does not fit (32 bits for a..d, 64 for x and y, none negative)."""
    try:
        return HEADER.pack(kind, a, b, c, d, x, y)
    except struct.error as error:
        raise ValueError(
            f"{KIND_NAMES[kind]} message with fields {(a, b, c, d, x, y)}: keys, epochs and tags must be integers in "
            f"0 .. 2**31-1 ({error})"
        ) from None


def pack_publish(keys: Sequence[int], epoch: int) -> bytes:
    return pack(PUBLISH, b=epoch, y=4 * len(keys)) + struct.pack(f"<{len(keys)}I", *keys)


def published_keys(message: bytes) -> tuple[int, ...]:
    """Of a PUBLISH."""
    return struct.unpack_from(f"<{(len(message) - HEADER_BYTES) // 4}I", message, HEADER_BYTES)


def pack_abort(culprit: int, reason: str) -> bytes:
    text = _short(reason)
    return pack(ABORT, culprit, y=len(text)) + text


def pack_broken(epoch: int, sent: int, reason: str, flags: int) -> bytes:
    text = _short(reason)
    return pack(BROKEN, flags, epoch, x=sent, y=len(text)) + text


def _short(text: str) -> bytes:
    return text.encode()[:MAX_TEXT].decode(errors="ignore").encode()  # never cut a character in two


def kind_of(message: bytes | bytearray | memoryview) -> int:
    return int.from_bytes(message[:4], "little")


def text_bytes(header: bytes | bytearray | memoryview) -> int:
    """Bytes that belong to the message itself and are handed to the receiver together with the header."""
    return HEADER.unpack_from(header)[6] if kind_of(header) in WITH_TEXT else 0


def payload_bytes(header: bytes | bytearray | memoryview) -> int:
    """Bytes that follow on the wire for the receiver's `landing` (only where memory is not directly mapped)."""
    return HEADER.unpack_from(header)[6] if kind_of(header) in (DEPOSIT, DATA) else 0
