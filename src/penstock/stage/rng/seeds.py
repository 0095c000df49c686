"""Seeds computed from names: one for each (seed, step, microbatch, layer), the same on every rank.

A layer's random numbers must not depend on the split or on the order in which layers run. So every stream of random
numbers starts from a seed that is computed from its key.
"""

from __future__ import annotations

import hashlib
from operator import index


def seed_of(*parts: object) -> int:
    """Return the seed of a key.

    Each part is hashed with its kind and its length before it, so that different keys never give the same bytes.
    """
    data = b""
    for part in parts:
        # `index` refuses a part that is neither text nor a whole number.
        kind, text = ("s", part) if isinstance(part, str) else ("i", str(index(part)))  # type: ignore[arg-type]
        encoded = text.encode()
        data += f"{kind}{len(encoded)}:".encode() + encoded
    return digest_seed(data)


def digest_seed(data: bytes) -> int:
    """Return a seed from 0 to 2**64 - 1: the first 8 bytes, little-endian, of the SHA-256 digest of the data.

    torch's CPU generator uses only the low 32 bits of a seed, its CUDA generator all 64.
    """
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
