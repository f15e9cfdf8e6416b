"""Seeds, separated by what they are for.

Two streams drawn from generators with the same seed are equal, not independent: a projection drawn like the data
would be correlated with it. Every use therefore has a domain of its own.
"""

from __future__ import annotations

import hashlib


def derive_seed(base_seed: int, domain: str, *numbers: int) -> int:
    """A 63-bit seed for one use, e.g. ``derive_seed(7, "rollout", update)``."""
    text = "|".join(["logra/seed/v1", domain, str(base_seed), *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
