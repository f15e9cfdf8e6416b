"""Random projections A (r, k) with E[AᵀA] = I, redrawn from a seed wherever they are needed (§2.1, §2.2).

A = scale · E. The entries E are what is drawn: ±1 (Rademacher, Hadamard), N(0, 1) (Gaussian) or orthonormal rows;
the scale, 1/√r or √(k/r), is kept apart because bf16 rounds it and because products with ±1 can be exact.

The bits come from a counter, not from a stream: word w of a projection is ``hash_words(seed, w)``, so that any
block of A can be drawn alone, on any device, in any order. Written down once, for every receiver to repeat:

* domain string ``logra/projection/v1``; the seed is the first 8 bytes (little-endian, signed) of
  blake2b-64(``"logra/projection/v1|{base_seed}|{update}|{canonical name}"``);
* word w is the SplitMix64 finaliser of ``seed + (w + 1) · 0x9E3779B97F4A7C15`` (mod 2^64);
* sign (i, j) is bit ``j % 64`` (0 the lowest) of word ``i · ⌈k/64⌉ + j // 64``; bit 1 is +1 and bit 0 is −1.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

Kind = Literal["rademacher", "gaussian", "orthonormal", "hadamard"]

DOMAIN = "logra/projection/v1"
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
WORD = 64
ALL = slice(None)


def canonical_name(name: str) -> str:
    """The name of a parameter without the parts that wrappers (FSDP, checkpointing, compile, DDP) put into it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def projection_seed(base_seed: int, update: int, name: str) -> int:
    """The 64-bit seed of one matrix's projection for one update, the same on every rank, device and engine."""
    text = f"{DOMAIN}|{base_seed}|{update}|{canonical_name(name)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def hash_words(seed: int, counters: Int[Tensor, "*words"]) -> Int[Tensor, "*words"]:
    """64 hashed bits for each counter (SplitMix64), as int64 whose overflow wraps around."""
    z = (counters + 1) * _signed(0x9E3779B97F4A7C15) + seed
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def sign_words(
    seed: int, width: int, rows: range, words: range, device: torch.device | str = "cpu"
) -> Int[Tensor, "r w"]:
    """The packed signs of some rows of a (·, width) sign matrix: r rows of 64-bit words, r·k/8 bytes in all."""
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    word = torch.arange(words.start, words.stop, device=device)
    return hash_words(seed, row * math.ceil(width / WORD) + word)


def unpack_signs(packed: Int[Tensor, "r w"], dtype: torch.dtype = torch.float32) -> Tensor:
    """Packed words to signs ±1, (r, 64·w)."""
    octets = packed.contiguous().view(torch.uint8)  # of little-endian words: the lowest bits come first
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    # A table of the eight signs of every octet is several times faster than shifting each word 64 times, and
    # index_select than an index.
    table = (2 * bits - 1).to(packed.device, dtype)
    return table.index_select(0, octets.flatten().int()).view(*octets.shape[:-1], -1)


def walsh_hadamard(x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
    """The last dimension (a power of two) times the ±1 Hadamard matrix H, H_ij = (−1)^popcount(i & j); O(k log k)."""
    width = x.shape[-1]
    half = 1
    while half < width:
        pairs = x.unflatten(-1, (width // (2 * half), 2, half))
        low, high = pairs.unbind(-2)
        x = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        half *= 2
    return x


def reconstruction_energy(kind: Kind, rank: int, width: int) -> float:
    """E‖ĝ‖² / ‖g‖² for a row g (k) and its reconstruction ĝ = g Aᵀ A: how much longer than g it is.

    Rademacher 1 + (k−1)/r, Gaussian 1 + (k+1)/r, orthonormal k/r, Hadamard with k padded to K
    1 + (k−1)(K−r)/(r(K−1)). The cosine between G and Ĝ is close to 1/√(this): a matter of shape alone.
    """
    padded = padded_width(width)
    return {
        "rademacher": 1 + (width - 1) / rank,
        "gaussian": 1 + (width + 1) / rank,
        "orthonormal": width / rank,
        "hadamard": 1 + (width - 1) * (padded - rank) / (rank * max(padded - 1, 1)),
    }[kind]


class Projection:
    """A (r, k), a function of its seed.

    ``keep`` holds what was drawn after its first use, for a projection that is used often: the bits of a Rademacher
    projection (r·k/8 bytes), otherwise the entries. Without it they are drawn at each use and nothing stays.

    Raises ``ValueError`` for an unknown kind, for r < 1, and for more rows than there are orthogonal ones
    (orthonormal: r > k; Hadamard: r > k padded to a power of two). Independent entries allow any r.
    """

    def __init__(self, kind: Kind, rank: int, width: int, seed: int, *, keep: bool = False) -> None:
        if kind not in get_args(Kind):
            raise ValueError(f"projection kind {kind!r} is unknown; choose one of {', '.join(get_args(Kind))}")
        if rank < 1 or width < 1:
            raise ValueError(f"a projection needs rank ≥ 1 and width ≥ 1, not rank {rank} and width {width}")
        most = {"orthonormal": width, "hadamard": padded_width(width)}.get(kind, rank)
        if rank > most:
            raise ValueError(f"rank {rank} is above {most}, the rows that a {kind} projection of width {width} has")
        self.kind, self.rank, self.width, self.seed, self.keep = kind, rank, width, seed, keep
        self.scale = math.sqrt(width / rank) if kind == "orthonormal" else 1 / math.sqrt(rank)
        self._kept: Tensor | None = None

    @property
    def has_signs(self) -> bool:
        """Whether the entries are ±1, so that products with small integers are exact (the exact sync needs it)."""
        return self.kind in ("rademacher", "hadamard")

    @property
    def kept_bytes(self) -> int:
        """What ``keep`` holds on to: bits of a Rademacher projection, fp32 entries of others, nothing of Hadamard's."""
        words = self.rank * math.ceil(self.width / WORD)
        return {"rademacher": 8 * words, "hadamard": 0}.get(self.kind, 4 * self.rank * self.width)

    def matrix(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Float[Tensor, "r k"]:
        """A itself."""
        return self.scale * self.entries(device, dtype)

    def project(self, x: Float[Tensor, "*n c"], columns: slice = ALL, *, scaled: bool = True) -> Tensor:
        """x Aᵀ, (*n, r). With ``columns``, x holds only these of the k inputs, and the results of all blocks add up.

        Without ``scaled``, x Eᵀ: the scale is left to a later sum in higher precision.
        """
        if self.kind == "hadamard":
            signs, rows = self._hadamard(x.device, x.dtype)
            mixed = x.new_zeros(*x.shape[:-1], padded_width(self.width))
            mixed[..., : self.width][..., columns] = x * signs[columns]
            projected = walsh_hadamard(mixed)[..., rows]
        else:
            projected = x @ self.entries(x.device, x.dtype, columns).T
        return self.scale * projected if scaled else projected

    def lift(self, u: Float[Tensor, "*d r"], columns: slice = ALL, *, scaled: bool = True) -> Tensor:
        """U A, (*d, k), or some of its columns; U may hold any block of rows. Without ``scaled``, U E."""
        if self.kind == "hadamard":
            signs, rows = self._hadamard(u.device, u.dtype)
            spread = u.new_zeros(*u.shape[:-1], padded_width(self.width))
            spread[..., rows] = u
            lifted = (walsh_hadamard(spread)[..., : self.width] * signs)[..., columns]
        else:
            lifted = u @ self.entries(u.device, u.dtype, columns)
        return self.scale * lifted if scaled else lifted

    def gram(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Float[Tensor, "r r"]:
        """A Aᵀ in fp64, of A as it is drawn in ``dtype``, for exact norms: ‖U A‖² = tr(UᵀU · AAᵀ)."""
        entries = self.entries(device, dtype)
        # Sums of ±1 are exact in fp32 up to 2^24 of them.
        exact = self.has_signs and dtype == torch.float32 and self.width <= 2**24
        entries = entries if exact else entries.double()
        return self.scale**2 * (entries @ entries.T).double()

    def entries(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, columns: slice = ALL
    ) -> Float[Tensor, "r c"]:
        """E = A / scale, or some of its columns."""
        device = torch.device(device)
        if self.kind == "rademacher":
            return self._signs(device, dtype, columns)
        if not self.keep:
            return self._draw(device, dtype, columns)
        if self._kept is None or self._kept.dtype != dtype or self._kept.device != device:
            self._kept = self._draw(device, dtype, ALL)
        return self._kept[:, columns]

    def packed(self, device: torch.device | str = "cpu", words: slice = ALL) -> Int[Tensor, "r w"]:
        """The signs of a Rademacher projection as bits: ``unpack_signs(packed)[:, :k]`` is E."""
        if self.kind != "rademacher":
            raise ValueError(f"only Rademacher entries are bits; this projection is {self.kind}")
        device, every = torch.device(device), range(math.ceil(self.width / WORD))
        if not self.keep:
            return sign_words(self.seed, self.width, range(self.rank), every[words], device)
        if self._kept is None or self._kept.device != device:
            self._kept = sign_words(self.seed, self.width, range(self.rank), every, device)
        return self._kept[:, words]

    def _signs(self, device: torch.device, dtype: torch.dtype, columns: slice) -> Tensor:
        start, stop, _ = columns.indices(self.width)
        words = slice(start // WORD, math.ceil(stop / WORD))
        first = words.start * WORD
        return unpack_signs(self.packed(device, words), dtype)[:, start - first : stop - first]

    def _draw(self, device: torch.device, dtype: torch.dtype, columns: slice) -> Tensor:
        start, stop, _ = columns.indices(self.width)
        if self.kind == "gaussian":
            return self._normal(range(start, stop), device).to(dtype)
        if self.kind == "orthonormal":
            q, triangle = torch.linalg.qr(self._normal(range(self.width), device).T)
            # Without the signs of R's diagonal the rows would not be uniform over all orthonormal ones.
            return (q * triangle.diagonal().sign()).T[:, start:stop].to(dtype).contiguous()
        return self.lift(torch.eye(self.rank, dtype=dtype, device=device), columns, scaled=False)

    def _normal(self, columns: range, device: torch.device) -> Tensor:
        """N(0, 1) in fp64 by Box–Muller: the word of each entry gives two uniforms of 32 bits."""
        row = torch.arange(self.rank, device=device)[:, None]
        column = torch.arange(columns.start, columns.stop, device=device)
        words = hash_words(self.seed, row * self.width + column)
        upper = ((words >> 32) & 0xFFFFFFFF).double()
        lower = (words & 0xFFFFFFFF).double()
        radius = torch.sqrt(-2 * torch.log((upper + 0.5) / 2**32))
        return radius * torch.cos(2 * math.pi * (lower + 0.5) / 2**32)

    def _hadamard(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The signs of the k inputs, and the r rows of the Hadamard matrix: those whose words are smallest."""
        padded = padded_width(self.width)
        signs = unpack_signs(sign_words(self.seed, padded, range(1), range(math.ceil(padded / WORD)), device), dtype)
        after = math.ceil(padded / WORD) + torch.arange(padded, device=device)
        rows = hash_words(self.seed, after).sort(stable=True).indices[: self.rank]
        return signs[0, : self.width], rows


def padded_width(width: int) -> int:
    """The power of two that a Hadamard projection pads k to."""
    return 1 << (width - 1).bit_length()


def _signed(word: int) -> int:
    return word - (1 << WORD) if word >> (WORD - 1) else word


def _shifted(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (WORD - by)) - 1)  # int64's >> repeats the sign bit; the hash wants zeros
