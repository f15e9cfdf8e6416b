"""The entries of all kinds against SplitMix64 in plain integers; the same in any block, dtype and thread."""

import inspect
import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from logra_ref.projection import (
    Projection,
    hash_words,
    projection_seed,
    sign_words,
    unpack_signs,
    walsh_hadamard,
)

KINDS = ("rademacher", "gaussian", "orthonormal", "hadamard")
MASK = 2**64 - 1
SHAPES = [(1, 1), (1, 64), (3, 65), (4, 63), (2, 128), (5, 130), (6, 6)]  # rank, width
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def word(seed: int, counter: int) -> int:
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def signs(seed: int, rank: int, width: int) -> np.ndarray:
    per_row = -(-width // 64)
    words = [[word(seed, i * per_row + w) for w in range(per_row)] for i in range(rank)]
    return np.array([[1.0 if row[j // 64] >> (j % 64) & 1 else -1.0 for j in range(width)] for row in words])


def normals(seed: int, rank: int, width: int) -> np.ndarray:
    def box_muller(w: int) -> float:
        radius = math.sqrt(-2 * math.log(((w >> 32) + 0.5) / 2**32))
        return radius * math.cos(2 * math.pi * ((w & 0xFFFFFFFF) + 0.5) / 2**32)

    return np.array([[box_muller(word(seed, i * width + j)) for j in range(width)] for i in range(rank)])


def hadamard(seed: int, rank: int, width: int) -> np.ndarray:
    padded = 2 ** math.ceil(math.log2(width))
    first = -(-padded // 64)
    keys = [word(seed, first + i) for i in range(padded)]
    rows = sorted(range(padded), key=lambda i: keys[i] - 2**64 * (keys[i] >= 2**63))[:rank]
    return scipy.linalg.hadamard(padded)[rows, :width] * signs(seed, 1, padded)[:, :width]


def entries(kind: str, rank: int, width: int, seed: int) -> np.ndarray:
    if kind == "orthonormal":  # Gram–Schmidt of the normal rows, here as L⁻¹ N with L Lᵀ = N Nᵀ
        rows = normals(seed, rank, width)
        return scipy.linalg.solve_triangular(np.linalg.cholesky(rows @ rows.T), rows, lower=True)
    return {"rademacher": signs, "gaussian": normals, "hadamard": hadamard}[kind](seed, rank, width)


def matrix(kind: str, rank: int, width: int, seed: int) -> np.ndarray:
    scale = math.sqrt(width / rank) if kind == "orthonormal" else 1 / math.sqrt(rank)
    return scale * entries(kind, rank, width, seed)


def random_integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float64))


@pytest.mark.parametrize(
    ("seed", "published"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]),
    ],
)
def test_hash_words_are_the_published_outputs_of_splitmix64_although_int64_has_a_sign(seed, published):
    found = hash_words(seed, torch.arange(len(published)))
    assert [int(w) & MASK for w in found] == published == [word(seed, i) for i in range(len(published))]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**62))
def test_hash_words_wrap_around_like_unsigned_integers_for_any_seed_and_counter(seed, counter):
    assert int(hash_words(seed, torch.tensor([counter]))) & MASK == word(seed, counter)


def test_golden_vectors_that_a_receiver_of_another_version_would_still_repeat():
    seed = projection_seed(0, 1, Q_PROJ)
    assert seed == 5214225852925255090
    packed = Projection("rademacher", 2, 70, seed).packed()
    assert [[hex(int(w) & MASK) for w in row] for row in packed] == [
        ["0xd84cfe2a8500b1b5", "0xf02f5c8c02dbd410"],
        ["0x3aae7a41f8573912", "0xc2f5357d8a8dd2f0"],
    ]
    first = [1, -1, 1, -1, 1, 1, -1, 1]  # 0xb5, lowest bit first
    assert Projection("rademacher", 2, 70, seed).entries()[0, :8].tolist() == first


@pytest.mark.parametrize(("rank", "width"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_matrix_is_drawn_as_written_down_for_edges_of_words_and_of_ranks(kind, rank, width):
    for seed in (0, -7, projection_seed(3, 9, "down_proj.weight")):
        expected = matrix(kind, rank, width, seed)
        projection = Projection(kind, rank, width, seed)
        np.testing.assert_allclose(projection.matrix(dtype=torch.float64), expected, rtol=0, atol=1e-11)
        np.testing.assert_allclose(projection.gram(), expected @ expected.T, rtol=0, atol=1e-10)
        if projection.has_signs:
            np.testing.assert_array_equal(projection.entries(), entries(kind, rank, width, seed))
        if width > 1:  # control: columns in another order, as with bits read from the other end, are seen
            assert np.abs(projection.matrix().numpy() - expected[:, ::-1]).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_kept_or_redrawn_in_any_dtype_the_numbers_are_the_same_and_only_kept_ones_stay(kind):
    kept, redrawn = Projection(kind, 4, 70, 11, keep=True), Projection(kind, 4, 70, 11)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float32):
        reference = Projection(kind, 4, 70, 11).entries(dtype=torch.float64).to(dtype)
        for _ in range(2):
            for projection in (kept, redrawn):
                drawn = projection.entries(dtype=dtype)
                assert drawn.dtype == dtype
                assert torch.equal(drawn, reference)
                assert torch.equal(projection.entries(dtype=dtype, columns=slice(5, 66)), reference[:, 5:66])
    held = [x for x in vars(kept).values() if isinstance(x, torch.Tensor)]
    if kind == "rademacher":  # two words a row, whatever was asked for
        assert [(x.dtype, tuple(x.shape)) for x in held] == [(torch.int64, (4, 2))]
    else:
        assert kept.entries().data_ptr() == kept.entries().data_ptr()
    assert not [x for x in vars(redrawn).values() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("kind", KINDS)
def test_gram_sums_the_kept_fp32_entries_in_fp64_and_does_not_push_them_out(kind):
    projection = Projection(kind, 4, 70, 11, keep=True)
    kept = projection.entries(dtype=torch.float32)
    wide = kept.double().numpy() * projection.scale
    np.testing.assert_allclose(projection.gram(dtype=torch.float32), wide @ wide.T, rtol=0, atol=1e-14 * 70)
    if kind != "rademacher":
        assert projection.entries(dtype=torch.float32).data_ptr() == kept.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_one_thread_and_two_draw_the_same(kind):
    before, drawn = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            drawn.append(Projection(kind, 32, 2048, 5).entries())  # above torch's grain of 32,768 numbers
    finally:
        torch.set_num_threads(before)
    if kind in ("rademacher", "hadamard"):
        assert torch.equal(*drawn)
    else:
        torch.testing.assert_close(*drawn, rtol=1e-6, atol=1e-6)


@st.composite
def shapes_and_cuts(draw):
    kind, width = draw(st.sampled_from(KINDS)), draw(st.integers(1, 150))
    rank = draw(st.integers(1, min(5, width)))
    cuts = draw(st.lists(st.integers(0, width), max_size=4))
    return kind, rank, width, draw(st.booleans()), list(itertools.pairwise(sorted([0, width, *cuts])))


@given(shapes_and_cuts(), st.integers(-(2**63), 2**63 - 1))
def test_projections_of_any_blocks_of_inputs_add_up_and_lifted_blocks_stand_side_by_side(shape, seed):
    kind, rank, width, keep, blocks = shape
    expected = entries(kind, rank, width, seed)
    x, u = random_integers(3, width), random_integers(4, rank)
    projection = Projection(kind, rank, width, seed, keep=keep)
    exact = projection.has_signs
    dtype = torch.float32 if exact else torch.float64
    projected = sum(projection.project(x[:, a:b].to(dtype), slice(a, b), scaled=False) for a, b in blocks)
    lifted = torch.cat([projection.lift(u.to(dtype), slice(a, b), scaled=False) for a, b in blocks], dim=1)
    rows = torch.cat([projection.lift(part.to(dtype), scaled=False) for part in u.split([1, 3])])
    for found, reference in (
        (projected, x.numpy() @ expected.T),
        (lifted, u.numpy() @ expected),
        (rows, u.numpy() @ expected),
    ):
        np.testing.assert_allclose(found, reference, rtol=0, atol=0 if exact else 1e-9)
    scaled = Projection(kind, rank, width, seed, keep=keep).project(x)
    np.testing.assert_allclose(scaled, x.numpy() @ matrix(kind, rank, width, seed).T, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_may_have_any_number_of_leading_dimensions_and_no_rows_at_all(kind):
    projection, expected = Projection(kind, 3, 10, 2), matrix(kind, 3, 10, 2)
    for leading in ((), (4,), (2, 3), (0,), (2, 0)):
        x, u = random_integers(*leading, 10), random_integers(*leading, 3)
        np.testing.assert_allclose(projection.project(x), x.numpy() @ expected.T, rtol=0, atol=1e-12)
        np.testing.assert_allclose(projection.lift(u), u.numpy() @ expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "rank", "width", "complaint"),
    [
        ("orthonormal", 5, 4, "rank 5 is above 4"),
        ("hadamard", 5, 3, "rank 5 is above 4"),
        ("rademacher", 0, 4, "rank 0"),
        ("gaussian", -1, 4, "rank -1"),
        ("rademacher", 1, 0, "width 0"),
    ],
)
def test_ranks_that_a_kind_does_not_have_are_refused_by_name(kind, rank, width, complaint):
    with pytest.raises(ValueError, match=complaint):
        Projection(kind, rank, width, 0)


def test_an_unknown_kind_is_refused_with_the_kinds_there_are():
    without_type_check = inspect.unwrap(Projection.__init__)
    with pytest.raises(ValueError, match="'bernoulli' is unknown; choose one of rademacher, gaussian"):
        without_type_check(object.__new__(Projection), "bernoulli", 1, 4, 0)


@pytest.mark.parametrize(
    ("kind", "rank", "width"),
    [("rademacher", 9, 4), ("gaussian", 9, 4), ("hadamard", 4, 3), ("rademacher", 3, 1), ("orthonormal", 4, 4)],
)
def test_more_rows_than_columns_are_allowed_where_the_kind_has_them(kind, rank, width):
    drawn = Projection(kind, rank, width, 1).matrix(dtype=torch.float64)
    assert drawn.shape == (rank, width)
    np.testing.assert_allclose(drawn, matrix(kind, rank, width, 1), rtol=0, atol=1e-12)


def test_only_sign_entries_promise_exact_products_and_only_rademacher_is_bits():
    for kind in KINDS:
        projection = Projection(kind, 3, 5, 0)
        assert projection.has_signs == bool((projection.entries().abs() == 1).all())
        if kind != "rademacher":
            with pytest.raises(ValueError, match=f"this projection is {kind}"):
                projection.packed()


@given(st.integers(1, 4), st.integers(1, 200), st.data())
def test_packed_bits_round_trip_and_any_block_of_them_is_drawn_alone(rank, width, data):
    projection = Projection("rademacher", rank, width, 8)
    packed, words = projection.packed(), -(-width // 64)
    assert packed.shape == (rank, words)
    assert packed.element_size() * packed.numel() == rank * words * 8
    assert torch.equal(unpack_signs(packed)[:, :width], projection.entries())
    first_row, first_word = data.draw(st.integers(0, rank)), data.draw(st.integers(0, words))
    block = sign_words(8, width, range(first_row, rank), range(first_word, words))
    assert torch.equal(block, packed[first_row:, first_word:])


@pytest.mark.parametrize("width", [1, 2, 4, 32, 128])
def test_walsh_hadamard_is_scipys_matrix_in_its_natural_order(width):
    x = random_integers(2, 3, width)
    np.testing.assert_array_equal(walsh_hadamard(x), x.numpy() @ scipy.linalg.hadamard(width))
