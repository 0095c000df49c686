"""Seeds from names: one number for each (seed, step, microbatch, layer), the same on every rank.

Nothing that is random in a layer may depend on how the model is cut or in which order its layers are run, so every
stream of random numbers starts from a seed that is computed from what it is for.
"""

from __future__ import annotations

import hashlib
from operator import index


def seed_of(*parts: object) -> int:
    """A seed from 0 to 2**64 - 1: the first 8 bytes, little end first, of the SHA-256 digest of the parts.

    Every part is written with its kind and its length before it, so different parts never read the same. torch's CPU
    generator uses the low 32 bits of a seed only, its CUDA generator all 64.

    Args:
        parts: strings, and whatever counts as an integer.

    Raises:
        TypeError: a part is neither.
    """
    digest = hashlib.sha256()
    for part in parts:
        kind, text = ("s", part) if isinstance(part, str) else ("i", str(index(part)))  # type: ignore[arg-type]
        encoded = text.encode()
        digest.update(f"{kind}{len(encoded)}:".encode() + encoded)
    return int.from_bytes(digest.digest()[:8], "little")
