"""The policy sync: integer factors, messages, and receivers that end with exactly the trainer's weights."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from logra_ref import LoGRA, Projection, attach_sketches
from logra_ref.projection import projection_seed
from logra_ref.sync import FactorMessage, SplitWeight, apply_message_, nudge_ties_, round_rows
from logra_ref.toy import ToyPolicy

RANK = 5


def draws(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Trainer:
    def __init__(self, kind: str = "rademacher", *, seed: int = 3, refresh: str = "every_update", rank: int = RANK):
        self.model = ToyPolicy(11, width=12, layers=1, heads=2, seed=1)
        self.sketches = attach_sketches(self.model, rank, kind=kind, seed=seed)
        self.optimizer = LoGRA(self.sketches, 1e-3, refresh=refresh, int8_factors=True)
        self.seed, self.alpha = seed, 0.7

    def proposal(self, number: int = 0):
        self.optimizer.zero_grad()
        tokens = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(number))
        self.model(tokens).log_softmax(-1)[..., 0].mean().backward()
        return self.optimizer.propose()

    def message(self, number: int = 0) -> FactorMessage:
        """Of an update that the trainer itself takes as well."""
        message = FactorMessage.of(self.proposal(number), self.alpha, base_seed=self.seed)
        self.optimizer.step(alpha=self.alpha)
        return message

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in self.sketches.weights().items()}


def test_rounded_rows_are_integers_below_128_within_half_a_scale():
    direction = draws(40, 9, seed=0) * torch.logspace(-30, 20, 40)[:, None]
    direction[7] = 0
    factor = round_rows(direction)
    assert factor.levels.eq(factor.levels.round()).all()
    assert factor.levels.abs().amax(1).tolist() == [127.0 if i != 7 else 0.0 for i in range(40)]
    np.testing.assert_allclose(factor.row_scale, direction.abs().amax(1) / 127, rtol=1e-6)
    error = (factor.levels.double() * factor.row_scale.double()[:, None] - direction.double()).abs()
    assert (error <= 0.5 * (1 + 1e-5) * factor.row_scale.double()[:, None]).all()


def test_a_row_of_zeros_has_scale_zero_and_no_nan():
    factor = round_rows(torch.zeros(3, 4))
    assert factor.row_scale.eq(0).all()
    assert factor.direction().eq(0).all()


def test_rounding_keeps_the_direction_to_a_cosine_of_0_9999():
    direction = draws(2000, 64, seed=1).double()
    cosine = torch.cosine_similarity(direction, round_rows(direction).direction(), dim=1)
    assert cosine.min() > 0.9998
    whole = torch.cosine_similarity(direction.flatten(), round_rows(direction).direction().flatten(), dim=0)
    assert whole > 0.9999


def test_a_message_is_one_byte_a_number_and_four_a_row_of_what_an_update_merges():
    trainer = Trainer()
    proposal = trainer.proposal()
    message = FactorMessage.of(proposal, 0.5, base_seed=trainer.seed)
    rows = sum(len(weight) for weight in trainer.weights().values())
    assert message.byte_count == rows * RANK + 4 * rows
    name = "blocks.0.down_proj.weight"
    factor = proposal.factors[name]
    expected = 0.5 * proposal.eta * factor.row_scale.double().numpy() / math.sqrt(RANK)
    np.testing.assert_allclose(message.coefficients[name], expected, rtol=1e-6)
    np.testing.assert_array_equal(message.levels[name].double(), factor.levels.double())


def altered(message: FactorMessage, **fields) -> FactorMessage:
    """As a message may arrive: nothing has checked its types."""
    result = copy.copy(message)
    for field, value in fields.items():
        object.__setattr__(result, field, value)
    return result


def with_matrix(message: FactorMessage, field: str, name: str, tensor: torch.Tensor) -> FactorMessage:
    return altered(message, **{field: {**getattr(message, field), name: tensor}})


def test_the_digest_changes_with_every_field_name_shape_and_bit():
    message = Trainer().message()
    first, second = list(message.levels)[:2]
    changed = [altered(message, update=2), altered(message, base_seed=4)]
    changed += [altered(message, kind="hadamard"), altered(message, rank=6)]
    renamed = {("other" if k == first else k): k for k in message.levels}
    changed.append(
        altered(
            message,
            levels={new: message.levels[old] for new, old in renamed.items()},
            coefficients={new: message.coefficients[old] for new, old in renamed.items()},
        )
    )
    levels, coefficients = message.levels[first], message.coefficients[first]
    changed.append(with_matrix(message, "levels", first, levels.T.contiguous()))
    changed.append(with_matrix(message, "levels", first, levels.reshape(RANK, -1)))  # the same bytes
    # The sum of the levels and of their squares stays: a fingerprint by sums would not see it.
    changed.append(with_matrix(message, "levels", first, levels.flip(0)))
    swapped = with_matrix(message, "levels", first, message.levels[second])
    changed.append(with_matrix(swapped, "levels", second, levels))
    for i in range(len(levels)):
        flipped = levels.clone()
        flipped[i, i % RANK] ^= 1
        changed.append(with_matrix(message, "levels", first, flipped))
        bits = coefficients.clone().view(torch.int32)
        bits[i] ^= 1
        changed.append(with_matrix(message, "coefficients", first, bits.view(torch.float32)))
    negative_zero = with_matrix(message, "coefficients", first, torch.full_like(coefficients, -0.0))
    changed += [negative_zero, with_matrix(message, "coefficients", first, torch.zeros_like(coefficients))]
    digests = [m.digest() for m in changed]
    assert len({message.digest(), *digests}) == len(changed) + 1
    reordered = altered(message, levels=dict(reversed(list(message.levels.items()))))
    assert copy.deepcopy(message).digest() == reordered.digest() == message.digest()


def merge_by_hand(blocks: list[tuple[slice, slice, torch.Tensor]], message: FactorMessage, name: str, width: int):
    """A receiver that holds blocks of rows and columns of one matrix; the last is merged first."""
    seed = projection_seed(message.base_seed, message.update, name)
    for rows, columns, block in reversed(blocks):
        projection = Projection(message.kind, message.rank, width, seed)
        lifted = projection.lift(message.levels[name][rows].float(), columns, scaled=False)
        block -= message.coefficients[name][rows][:, None] * lifted


@pytest.mark.parametrize("kind", ["rademacher", "hadamard"])
def test_receivers_with_other_shards_are_bit_equal_after_twenty_updates(kind):
    trainer = Trainer(kind)
    start, whole = trainer.weights(), trainer.weights()
    name = "blocks.0.down_proj.weight"  # (12, 48)
    cuts = [(r, c) for r in (slice(5), slice(5, 6), slice(6, 12)) for c in (slice(31), slice(31, 48))]
    blocks = [(rows, columns, start[name][rows, columns].clone()) for rows, columns in cuts]
    for number in range(20):
        message = trainer.message(number)
        apply_message_(whole, message)
        merge_by_hand(blocks, message, name, 48)
    trained = trainer.weights()
    assert all(torch.equal(whole[n], trained[n]) for n in trained)
    assert all(torch.equal(block, trained[name][rows, columns]) for rows, columns, block in blocks)
    # Control: the updates moved the weights, nearly all of them.
    assert all((trained[n] != start[n]).float().mean() > 0.9 for n in trained)


@pytest.mark.parametrize("kind", ["rademacher", "hadamard"])
def test_a_merge_is_an_exact_integer_sum_one_product_and_one_difference(kind):
    trainer = Trainer(kind)
    before = trainer.weights()
    message = trainer.message()
    for name, weight in trainer.weights().items():
        seed = projection_seed(trainer.seed, 1, name)
        signs = Projection(kind, RANK, weight.shape[1], seed).entries(dtype=torch.float64).numpy().astype(np.int64)
        assert set(np.unique(signs)) == {-1, 1}
        total = (message.levels[name].numpy().astype(np.int64) @ signs).astype(np.float32)
        expected = before[name].numpy() - message.coefficients[name].numpy()[:, None] * total
        assert expected.dtype == np.float32
        np.testing.assert_array_equal(weight.numpy(), expected)


def test_a_receiver_follows_projections_that_stay_fixed():
    trainer = Trainer(refresh="fixed")
    received = trainer.weights()
    for number in range(3):
        apply_message_(received, trainer.message(number))
    assert all(torch.equal(received[name], weight) for name, weight in trainer.weights().items())


@pytest.mark.parametrize("kind", ["gaussian", "orthonormal"])
def test_kinds_without_signs_still_agree_to_rounding(kind):
    trainer = Trainer(kind)
    received, start = trainer.weights(), trainer.weights()
    apply_message_(received, trainer.message())
    for name, weight in trainer.weights().items():
        np.testing.assert_allclose(received[name] - start[name], weight - start[name], atol=1e-6)


def test_factors_that_are_not_rounded_or_drawn_from_another_seed_are_refused():
    trainer = Trainer()
    with pytest.raises(ValueError, match="base seed 4"):
        FactorMessage.of(trainer.proposal(), 1.0, base_seed=4)
    trainer.optimizer.int8_factors = False
    with pytest.raises(ValueError, match="int8_factors=True"):
        FactorMessage.of(trainer.proposal(), 1.0, base_seed=trainer.seed)


def spoilt(message: FactorMessage, name: str) -> dict[str, FactorMessage]:
    levels, coefficients = message.levels[name], message.coefficients[name]
    without = {k: v for k, v in message.coefficients.items() if k != name}
    nan, infinite = coefficients.clone(), coefficients.clone()
    nan[-1], infinite[0] = math.nan, math.inf
    return {
        "levels of fp32": with_matrix(message, "levels", name, levels.float()),
        "levels of int16": with_matrix(message, "levels", name, levels.short()),
        "a row less": with_matrix(message, "levels", name, levels[1:]),
        "a column less": with_matrix(message, "levels", name, levels[:, 1:]),
        "a coefficient less": with_matrix(message, "coefficients", name, coefficients[1:]),
        "one coefficient for all": with_matrix(message, "coefficients", name, coefficients[:1]),
        "coefficients of fp64": with_matrix(message, "coefficients", name, coefficients.double()),
        "coefficients of bf16": with_matrix(message, "coefficients", name, coefficients.bfloat16()),
        "a NaN": with_matrix(message, "coefficients", name, nan),
        "an infinity": with_matrix(message, "coefficients", name, infinite),
        "no coefficients": altered(message, coefficients=without),
        "another rank": altered(message, rank=RANK + 1),
    }


CASES = list(spoilt(Trainer().message(), "blocks.0.q_proj.weight"))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_bad_matrix_changes_nothing_even_when_it_is_the_last(case, last):
    trainer = Trainer()
    before = trainer.weights()
    message = trainer.message()
    name = list(before)[-1 if last else 0]
    received = {n: weight.clone() for n, weight in before.items()}
    with pytest.raises(ValueError):
        apply_message_(received, spoilt(message, name)[case])
    assert all(torch.equal(received[n], before[n]) for n in before)


def test_a_model_that_lacks_a_matrix_or_holds_it_in_another_form_is_refused_unchanged():
    trainer = Trainer()
    before = trainer.weights()
    message, name = trainer.message(), list(before)[-1]
    for other in (None, before[name][:-1], before[name].bfloat16(), before[name].double()):
        received = {n: weight.clone() for n, weight in before.items() if n != name}
        if other is not None:
            received[name] = other.clone()
        with pytest.raises(ValueError, match="nothing was changed"):
            apply_message_(received, message)
        assert all(torch.equal(received[n], before[n]) for n in before if n != name)


def test_a_rank_that_only_the_last_matrix_cannot_have_changes_nothing():
    """Orthogonal rows: rank 20 exists for 32 inputs but not for 16."""
    weights = {"wide": torch.zeros(3, 32), "narrow": torch.zeros(3, 16)}
    levels = {name: torch.ones(3, 20, dtype=torch.int8) for name in weights}
    message = FactorMessage(1, 0, "hadamard", 20, levels, {name: torch.ones(3) for name in weights})
    with pytest.raises(ValueError, match="rank 20"):
        apply_message_(weights, message)
    assert all(weight.eq(0).all() for weight in weights.values())


def test_receivers_of_parameters_update_them_in_place():
    trainer = Trainer()
    engine = copy.deepcopy(ToyPolicy(11, width=12, layers=1, heads=2, seed=1))
    weights = {name: p for name, p in engine.named_parameters() if name in trainer.weights()}
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in weights.values())
    apply_message_(weights, trainer.message())
    assert all(torch.equal(weights[name], weight) for name, weight in trainer.weights().items())


def test_a_bf16_engine_with_low_halves_follows_the_trainer_and_one_without_does_not():
    trainer = Trainer()
    for weight in trainer.sketches.weights().values():
        nudge_ties_(weight)
    engine = {name: SplitWeight.of(weight) for name, weight in trainer.weights().items()}
    plain = {name: weight.to(torch.bfloat16) for name, weight in trainer.weights().items()}
    trainer.alpha = 0.06  # 6e-5 of the weights
    for number in range(20):
        message = trainer.message(number)
        for weight in trainer.sketches.weights().values():
            nudge_ties_(weight)
        joined = {name: split.join() for name, split in engine.items()}
        apply_message_(joined, message)
        for name, weight in joined.items():
            nudge_ties_(weight)
            engine[name] = SplitWeight.of(weight)
        step = {name: weight.float() for name, weight in plain.items()}
        apply_message_(step, message)
        plain = {name: weight.to(torch.bfloat16) for name, weight in step.items()}
    for name, weight in trainer.weights().items():
        assert torch.equal(engine[name].high, weight.to(torch.bfloat16))
        assert torch.equal(engine[name].join(), weight)
    wrong = [(plain[name] != weight.to(torch.bfloat16)).float().mean() for name, weight in trainer.weights().items()]
    assert min(wrong) > 0.05
