"""The conformance suite: every variant, on any problem, is exact and counts what its form says."""

from __future__ import annotations

import ast
import inspect

import numpy as np
import pytest
import tolerances
from hypothesis import given
from hypothesis import strategies as st
from problems import Problem, problems, values

import simattn
from simattn import exact, softmax, variants
from simattn.bounds import error_bound
from simattn.dtypes import DTYPES
from simattn.variants import VARIANTS

MASK = ("is_causal", "window_size", "scale")


def check_against_oracle(p: Problem) -> simattn.Run:
    run = simattn.attention(p.q, p.k, p.v, **p.options)
    storage = DTYPES[p.options["dtype"]]
    q, k, v = (tolerances.stored(x, storage) for x in (p.q, p.k, p.v))
    out, lse = exact.attention(q, k, v, **{key: p.options[key] for key in MASK})
    scale = 1 / np.sqrt(q.shape[-1]) if p.options["scale"] is None else p.options["scale"]
    out_bound, lse_bound = error_bound(
        q, k, v, storage=storage, variant=run.variant, block_k=run.block_k, scale=scale
    )
    assert run.out.shape == out.shape
    assert np.abs(run.out.astype(np.float64) - out).max(initial=0) <= out_bound
    if run.lse is not None:
        assert run.lse.shape == lse.shape
        blind = np.isneginf(lse)
        np.testing.assert_array_equal(np.isneginf(run.lse), blind)
        assert np.abs(run.lse[~blind] - lse[~blind]).max(initial=0) <= lse_bound
    return run


@given(problems())
def test_is_exact_and_counts_as_predicted(p: Problem) -> None:
    inputs = [x.copy() for x in (p.q, p.k, p.v)]
    run = check_against_oracle(p)
    assert not run.differences()
    assert run.counts == run.predicted
    for before, after in zip(inputs, (p.q, p.k, p.v), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("variant", VARIANTS)
@given(data=st.data())
def test_every_variant_is_exact_untiled(variant: str, data: st.DataObject) -> None:
    p = data.draw(problems(max_rows=10, variants=(variant,)))
    p.options.update(block_q=1, block_k=1)
    run = check_against_oracle(p)
    assert run.as_predicted
    assert run.block_q == run.block_k == 1


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_is_as_accurate_as_plain_numpy(variant: str, dtype: str, is_causal: bool) -> None:
    rng = np.random.default_rng(7)
    n, s, d, e, block_k = 96, 160, 32, 24, 32
    q, k, v = values(rng, "normal", (n, d), (s, d), (s, e))
    run = simattn.attention(
        q, k, v, variant=variant, dtype=dtype, is_causal=is_causal, block_q=48, block_k=block_k
    )
    storage = DTYPES[dtype]
    hidden = np.triu(np.ones((n, s), bool), s - n + 1) & is_causal
    error = np.abs(
        run.out.astype(np.float64)
        - tolerances.reference(
            *(tolerances.stored(x, storage) for x in (q, k, v)), scale=d**-0.5, hidden=hidden
        )
    ).max()
    # Where O is stored at every visit, the error grows with the number of key tiles.
    stores = s // block_k + 1 if VARIANTS[variant].stores_each_visit else 1
    assert error <= tolerances.allowed(
        q, k, v, scale=d**-0.5, hidden=hidden, storage=storage,
        stores_scores=VARIANTS[variant].stores_scores, stores=stores,
    )  # fmt: skip


@given(problems(kinds=("normal", "ties"), dtypes=("float64",)), st.floats(-50, 50))
def test_shifting_all_scores_changes_nothing(p: Problem, shift: float) -> None:
    """A constant added to every score of a row: one more column of K, the same for all keys."""
    run = simattn.attention(p.q, p.k, p.v, **p.options)
    scale = 1 / np.sqrt(p.q.shape[-1]) if p.options["scale"] is None else p.options["scale"]
    q = np.concatenate([p.q, np.ones_like(p.q[..., :1])], axis=-1)
    k = np.concatenate([p.k, np.full_like(p.k[..., :1], shift)], axis=-1)
    moved = simattn.attention(q, k, p.v, **(p.options | {"scale": scale}))
    bound = error_bound(
        q, k, p.v, storage=DTYPES["float64"], variant=run.variant, block_k=run.block_k, scale=scale
    )
    np.testing.assert_allclose(moved.out, run.out, rtol=0, atol=2 * bound[0])
    if run.lse is not None and moved.lse is not None:
        seen = np.isfinite(run.lse)
        np.testing.assert_allclose(
            moved.lse[seen], run.lse[seen] + scale * shift, rtol=0, atol=2 * bound[1]
        )


@given(problems(max_rows=12, kinds=("normal",)), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_hidden_key_takes_no_part(p: Problem, poison: float) -> None:
    """Whatever K and V rows hold that a query cannot see, its output is the same, bit for bit."""
    s, n = p.k.shape[-2], p.q.shape[-2]
    p.options["is_causal"] = True
    clean = simattn.attention(p.q, p.k, p.v, **p.options)
    for hidden_from in range(max(0, s - n), s):
        k, v = p.k.copy(), p.v.copy()
        k[..., hidden_from:, :], v[..., hidden_from:, :] = poison, poison
        run = simattn.attention(p.q, k, v, **p.options)
        sees_none_of_it = np.arange(n) + s - n < hidden_from
        np.testing.assert_array_equal(
            run.out[..., sees_none_of_it, :], clean.out[..., sees_none_of_it, :]
        )
        assert run.counts == clean.counts


@given(problems(max_rows=12, kinds=("normal",), dtypes=("float32", "float64")), st.data())
def test_scores_that_are_not_finite_spoil_their_own_row_only(p: Problem, data) -> None:
    n, s = p.q.shape[-2], p.k.shape[-2]
    if not (n and s):
        return
    p.options.update(scale=1.0, window_size=(-1, -1), is_causal=False)
    k = np.abs(p.k) + 0.1  # an infinite query then has scores of +inf
    clean = simattn.attention(p.q, k, p.v, **p.options)
    row, bad = data.draw(st.integers(0, n - 1)), data.draw(st.sampled_from([np.nan, np.inf]))
    q = p.q.copy()
    q[..., row, :] = bad
    run = simattn.attention(q, k, p.v, **p.options)
    assert np.isnan(run.out[..., row, :]).all()
    rest = np.arange(n) != row
    np.testing.assert_array_equal(run.out[..., rest, :], clean.out[..., rest, :])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block_k", [1, 2, 5])
def test_a_visible_score_of_minus_infinity_weighs_nothing(variant: str, block_k: int) -> None:
    q = np.ones((2, 1))
    k = np.array([[-np.inf], [0.0], [0.0], [-np.inf], [-np.inf]])
    v = np.array([[7.0], [1.0], [3.0], [7.0], [7.0]])
    run = simattn.attention(q, k, v, variant=variant, block_q=2, block_k=block_k, return_lse=True)
    np.testing.assert_allclose(run.out, [[2.0], [2.0]], rtol=1e-15)
    np.testing.assert_allclose(run.lse, np.log(2), rtol=1e-15)
    blind = simattn.attention(
        q, np.full_like(k, -np.inf), v, variant=variant, block_q=2, block_k=block_k, return_lse=True
    )
    np.testing.assert_array_equal(blind.out, 0)
    np.testing.assert_array_equal(blind.lse, -np.inf)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rows_no_keys_no_batch(variant: str) -> None:
    def run(lead, n, s):
        q, k, v = np.ones((*lead, n, 3)), np.ones((*lead, s, 3)), np.ones((*lead, s, 2))
        return simattn.attention(q, k, v, variant=variant, return_lse=True)

    no_keys = run((2, 1), 4, 0)
    np.testing.assert_array_equal(no_keys.out, np.zeros((2, 1, 4, 2)))
    np.testing.assert_array_equal(no_keys.lse, np.full((2, 1, 4), -np.inf))
    assert no_keys.as_predicted
    for lead, n, s in (((2, 1), 0, 4), ((0, 1), 4, 4), ((1, 0), 4, 4)):
        empty = run(lead, n, s)
        assert empty.out.shape == (*lead, n, 2)
        assert empty.lse.shape == (*lead, n)
        assert empty.as_predicted
        assert empty.traffic.total_elems == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_far_below_any_made_up_minus_infinity(variant: str) -> None:
    """All scores of a row near -1e8: no constant stands in for -inf on the way."""
    q, k = np.full((2, 1), -1.0), np.array([[1e8], [1e8], [1e8 + 1]])
    v = np.array([[1.0], [3.0], [2.0]])
    run = simattn.attention(
        q, k, v, variant=variant, scale=1.0, block_q=1, block_k=2, return_lse=True
    )
    out, lse = exact.attention(q, k, v, scale=1.0)
    np.testing.assert_allclose(run.out, out, rtol=1e-14)
    np.testing.assert_allclose(run.lse, lse, rtol=1e-15)


@pytest.mark.parametrize("scale", [1e39, -1e39, 1e-44, 1e300, -0.0])
def test_any_finite_scale(scale: float) -> None:
    """Beyond float32's range too, as long as the scores are within."""
    rng = np.random.default_rng(0)
    small = 1.0 if abs(scale) < 1 else max(abs(scale) ** -0.5, 1e-30)
    q, k, v = values(rng, "normal", (3, 4), (5, 4), (5, 2))
    q, k, v = (q * small).astype("f4"), (k * small).astype("f4"), v.astype("f4")
    if abs(scale) == 1e300:
        k = 0 * k
    run = simattn.attention(q, k, v, scale=scale, block_q=2, block_k=2)
    np.testing.assert_allclose(run.out, exact.attention(q, k, v, scale=scale)[0], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_are_values_of_their_storage_format(variant: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = values(rng, "normal", (9, 4), (11, 4), (11, 3))
    out = simattn.attention(q, k, v, variant=variant, dtype=dtype, block_q=4, block_k=4).out
    np.testing.assert_array_equal(DTYPES[dtype].round(out.astype(np.float64)), out)
    assert len(np.unique(out)) > 5


def test_causal_is_aligned_bottom_right() -> None:
    """The masks that the docstring draws: 2 x 5 and 5 x 2. Values tell which keys were seen."""
    v = np.eye(5)
    wide = simattn.attention(np.zeros((2, 1)), np.zeros((5, 1)), v, is_causal=True).out
    np.testing.assert_array_equal(wide > 0, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    tall = simattn.attention(np.zeros((5, 1)), np.zeros((2, 1)), v[:2, :2], is_causal=True).out
    np.testing.assert_array_equal(tall > 0, [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]])
    window = simattn.attention(np.zeros((3, 1)), np.zeros((5, 1)), v, window_size=(1, 1)).out
    np.testing.assert_array_equal(window > 0, [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])


def test_each_query_head_reads_its_group() -> None:
    rng = np.random.default_rng(0)
    q, k, v = values(rng, "normal", (6, 5, 4), (2, 7, 4), (2, 7, 3))
    grouped = simattn.attention(q, k, v)
    full = simattn.attention(q, np.repeat(k, 3, axis=0), np.repeat(v, 3, axis=0))
    np.testing.assert_array_equal(grouped.out, full.out)
    assert grouped.counts == full.counts  # each query head still loads its K and V


def test_chunk_counts_become_tiles_that_lose_no_row() -> None:
    """13 rows in 4 chunks, 13 keys in 3: tiles of ceil(13 / chunks), all rows and keys kept."""
    rng = np.random.default_rng(1)
    q, k, v = values(rng, "normal", (1, 13, 10), (1, 13, 10), (1, 13, 6))
    run = simattn.attention(q, k, v, scale=1.0, block_q=-(-13 // 4), block_k=-(-13 // 3))
    assert run.out.shape == (1, 13, 6)
    np.testing.assert_allclose(run.out, exact.attention(q, k, v, scale=1.0)[0], atol=1e-14)


def test_loop_nests_cannot_compute_outside_the_machine() -> None:
    """No NumPy in the loop nests, and no reaching behind a Region's or Tile's underscore."""
    for module in (variants, softmax):
        tree = ast.parse(inspect.getsource(module))
        imported = {
            alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        } | {
            (node.module or "").split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        assert "numpy" not in imported
        touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not {a for a in touched if a.startswith("_")} - {"_raise_max", "__name__"}
