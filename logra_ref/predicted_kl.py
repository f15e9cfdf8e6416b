"""How far a proposal would move the policy, before it is applied (§2.3, Eq. 5 and 6, A.1).

With p = softmax(z/T) and ż the rate of change of the logits z along the proposal D,

    mean over contexts of KL(π_θ ‖ π_{θ+αD}) = α² q(D) + O(α³),     q(D) = Var_{v∼p}[ż_v] / (2 T²), its mean.

The three probes give the coefficient position by position: by forward-mode differentiation (``probe_jvp``), from
the exact KL of a small step (``probe_finite_difference``), or of the step itself (``probe_exact``).

A probe takes the contexts in any form and in any blocks, and ``logits_of``, which runs the model on one block and
returns the logits (p, v) at its response positions. It must be a pure function of block and weights: no dropout, no
cache. Where p v numbers are too many, it returns the hidden states (p, h) before an output layer that the update
leaves as it is, and ``readout`` makes logits of some positions at a time. Sketches are not touched: nothing here
calls backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from logra_ref.holding import Total, identity
from logra_ref.update import FactoredUpdate

Block = TypeVar("Block")
LogitsOf = Callable[[Block], Tensor]
Readout = Callable[..., Tensor]
"""``readout(measure, *hidden)``: the values that ``measure(*logits)`` has for each position, joined."""


def whole(measure: Callable[..., Float[Tensor, " p"]], *logits: Float[Tensor, "p v"]) -> Float[Tensor, " p"]:
    """The readout for logits that are there: all positions at once."""
    return measure(*logits)


def predicted_kl(logits: Float[Tensor, "p v"], rates: Float[Tensor, "p v"], temperature: float) -> Float[Tensor, " p"]:
    """Var_{v∼p}[ż_v] / (2 T²) at each position (Eq. 6), in fp64: the coefficient of α² in the KL, in nats."""
    return _centred(logits, rates, temperature, 1.0)[1] / (2 * temperature**2)


def exact_kl(logits: Float[Tensor, "p v"], new_logits: Float[Tensor, "p v"], temperature: float) -> Float[Tensor, " p"]:
    """KL(softmax(z/T) ‖ softmax(z'/T)) at each position, in nats, fp64.

    With c = (z' − z)/T less its mean under p, the KL is log E_p[e^c] = log(1 + E_p[e^c − 1 − c]): a sum of terms
    that are never negative, so that nothing cancels when the change is small (their lead is c²/2, hence Eq. 6).
    """
    shift, _, log_p = _centred(logits, new_logits.double() - logits.double(), temperature, 1 / temperature)
    # e^c − 1 − c would itself cancel for small c; there its series is good to 1e-13.
    series = shift**2 / 2 * (1 + shift / 3 * (1 + shift / 4 * (1 + shift / 5 * (1 + shift / 6))))
    excess = torch.where(shift.abs() < 1e-2, series, torch.expm1(shift) - shift)
    moderate = torch.log1p((log_p.exp() * excess).sum(-1))
    # e^c overflows fp64 beyond 709; far from there the logarithm of the whole sum is as accurate.
    large = torch.logsumexp(log_p + shift, dim=-1)
    return torch.where(shift.amax(-1) < 500, moderate, large)


def _centred(logits: Tensor, change: Tensor, temperature: float, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """``factor`` · change less its mean under p, its variance under p, and log p with p = softmax(z/T); all fp64."""
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)
    # A masked token (z = −∞) has no part, whatever its change; a NaN anywhere else must stay visible. The test is on
    # log p: a p that merely underflowed to 0 may grow to any size.
    p, masked = log_p.exp(), log_p == -torch.inf
    change = torch.where(masked, 0, factor * change.double())
    centred = torch.where(masked, 0, change - (p * change).sum(-1, keepdim=True))
    return centred, (p * centred.square()).sum(-1), log_p


def probe_jvp(
    update: FactoredUpdate,
    contexts: Iterable[Block],
    logits_of: LogitsOf,
    *,
    temperature: float,
    readout: Readout = whole,
) -> Float[Tensor, " p"]:
    """q(D) position by position from one forward-mode pass, each layer adding −η (x Aᵀ) Uᵀ to its rate.

    Scaled-dot-product attention is held to its MATH form, the only one with a forward mode. Raises ``RuntimeError``
    where the model has an operation without one, naming the alternative, and where no rate arrives at the logits.
    """

    def coefficient(logits: Tensor) -> Tensor:
        value, rate = forward_ad.unpack_dual(logits)
        if rate is None:
            raise RuntimeError("no rate of change arrived at the logits: inference mode, or no selected layer ran")
        return predicted_kl(value, rate, temperature)

    found = []
    with torch.no_grad(), update.tangents(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        for block in contexts:
            try:
                found.append(readout(coefficient, logits_of(block)))
            except (RuntimeError, NotImplementedError) as error:
                if "forward" not in str(error):
                    raise
                raise RuntimeError(
                    f"forward-mode differentiation failed ({error}); load the model with eager or sdpa attention, "
                    "or use the finite-difference probe"
                ) from error
    return torch.cat(found)


def probe_finite_difference(
    update: FactoredUpdate,
    contexts: Iterable[Block],
    logits_of: LogitsOf,
    *,
    temperature: float,
    step: float = 0.1,
    readout: Readout = whole,
) -> Float[Tensor, " p"]:
    """q(D) position by position as the exact KL at ±h over h²; the mean of both signs has no cubic term.

    The displaced models are computed from the factors; no weight changes. ``step`` is h, a fraction of the proposal.
    """

    def coefficient(logits: Tensor, ahead: Tensor, behind: Tensor) -> Tensor:
        kl = exact_kl(logits, ahead, temperature) + exact_kl(logits, behind, temperature)
        return kl / (2 * step**2)

    found = []
    with torch.no_grad():
        for block in contexts:
            here, displaced = logits_of(block), []
            for alpha in (step, -step):
                with update.displaced(alpha):
                    displaced.append(logits_of(block))
            found.append(readout(coefficient, here, *displaced))
    return torch.cat(found)


def probe_exact(
    update: FactoredUpdate,
    contexts: Iterable[Block],
    logits_of: LogitsOf,
    *,
    temperature: float,
    alpha: float = 1.0,
    readout: Readout = whole,
) -> Float[Tensor, " p"]:
    """The exact KL of the merged step α, over α²: apply, measure, restore the weights bit for bit.

    Keeps a copy of the selected weights and of the logits meanwhile; the oracle of the other two, and for models
    that neither of them can run.
    """
    contexts = list(contexts)
    weights = list(update.weights.values())
    with torch.no_grad():
        before = [logits_of(block) for block in contexts]
        copies = [weight.clone() for weight in weights]
        try:
            update.apply_(alpha)
            after = [logits_of(block) for block in contexts]
        finally:
            for weight, copy in zip(weights, copies, strict=True):
                weight.copy_(copy)

    def kl(logits: Tensor, new_logits: Tensor) -> Tensor:
        return exact_kl(logits, new_logits, temperature)

    return torch.cat([readout(kl, *pair) for pair in zip(before, after, strict=True)]) / alpha**2


def mean_and_error(
    values: Float[Tensor, " p"], response: Int[Tensor, " p"], total: Total = identity
) -> tuple[float, float]:
    """The mean over positions and its standard error, for positions that come in whole responses.

    Positions of one response are not independent, so responses are what is counted: with X_i the sum and n_i the
    number of response i, m responses in all, q = Σ X_i / Σ n_i and its error is √(m/(m−1) Σ (X_i − q n_i)²) / Σ n_i;
    NaN for a single response. Ranks that hold different responses hand in ``total``.
    """
    _, index = torch.unique(response, return_inverse=True)
    sums = values.new_zeros(int(index.max()) + 1 if len(index) else 0).index_add_(0, index, values)
    counts = torch.zeros_like(sums).index_add_(0, index, torch.ones_like(values))
    whole, positions, responses = total(torch.stack([sums.sum(), counts.sum(), sums.new_tensor(len(sums))]))
    if positions == 0:
        raise ValueError("the probe has no positions: every response is empty")
    mean = whole / positions
    scatter = total(((sums - mean * counts) ** 2).sum())
    error = torch.sqrt(responses / (responses - 1) * scatter) / positions
    return float(mean), float(error)
