"""float32 on tensor cores that truncate: what the chains are for, and that they are enough.

The error allowed is twice that of NumPy's float32 attention against float64, plus one rounding.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ptx
from kernels._cuda import SIMULATOR
from kernels.emulated import attention
from kernels.mma_layout import layout_for
from kernels.tensor_core import AMPERE, HOPPER, add_products, multiply_add, truncated
from simattn import exact

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the emulator takes kernels meant for a GPU")
CORES = {"sm_80": AMPERE, "sm_90": HOPPER}
ROUNDING = 2.0**-24


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def plain(q, k, v, *, is_causal=False):
    """Untiled attention in float32."""
    S = q @ np.swapaxes(k, -1, -2) * np.float32(q.shape[-1] ** -0.5)
    if is_causal:
        n, s = S.shape[-2:]
        S = np.where(np.arange(s) > np.arange(n)[:, None] + s - n, np.float32(-np.inf), S)
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    return (P / P.sum(axis=-1, keepdims=True)) @ v


def used(q, k, v, core=HOPPER, *, chain=2, block_k=32, **options):
    """The kernel's error, in units of what is allowed: twice that of plain float32, which may be
    small by luck, and one rounding of the output and of the largest score, as `check_cores` has it.
    """
    usual = layout_for(q.shape[-1], v.shape[-1], itemsize=4)
    layout = replace(usual, warps=1, row_tiles=1, block_k=block_k, min_blocks=1, chain=chain)
    with truncated(core):
        done = attention(q, k, v, layout=layout, **options)
    done.report.check()
    right, _ = exact.attention(*(x.astype(np.float64) for x in (q, k, v)), **options)
    allowed = 2 * np.abs(plain(q, k, v, **options) - right).max()
    largest = np.abs(q @ np.swapaxes(k, -1, -2)).max() * q.shape[-1] ** -0.5 * np.abs(v).max()
    allowed += ROUNDING * (np.abs(right).max() + largest)
    return np.abs(done.out - right).max() / allowed


# ---- how tensor cores add -----------------------------------------------------------------------


def test_sums_are_cut_toward_zero():
    one, last = np.ones((1, 1), np.float32), np.full((1, 1), 2.0**-24, np.float32)
    for sign in (1, -1):
        for core, kept in ((AMPERE, 1), (HOPPER, 1)):  # 3/4 of a unit and the rest of it
            terms = np.hstack([last, last / 2, last / 4, last / 4]) * np.float32(sign)
            C = add_products(terms, np.ones((4, 1), np.float32), sign * one, core.guard)
            unit = (abs(C) - 1) * 2**23
            assert (unit < kept).all()
    # terms below the guard bits are lost one by one, however many
    many = np.full((1, 8), 2.0**-26, np.float32)
    assert add_products(many, np.ones((8, 1), np.float32), one, AMPERE.guard) == 1
    many = np.full((1, 8), 2.0**-25, np.float32)
    assert add_products(many, np.ones((8, 1), np.float32), one, HOPPER.guard) == 1 + 2.0**-22


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_sum_is_within_a_unit_for_each_term(core, seed):
    with truncated(core):
        A, B, C = (normal(seed + i, *shape) for i, shape in enumerate(((16, 8), (8, 8), (16, 8))))
        A, B = (ptx.widths_tf32(x.view(np.uint32)) for x in (A, B))
        D = multiply_add(A, B, C)
    wide = A.astype(np.float64) @ B + C
    largest = np.maximum(np.abs(A[:, :, None] * B[None]).max(axis=1), np.abs(C))
    assert (np.abs(D - wide) <= largest * 2.0**-20).all()
    whole = [np.rint(8 * x) for x in (A, B, C)]
    with truncated(core):
        assert (multiply_add(*whole) == whole[0] @ whole[1] + whole[2]).all()


# ---- why chains ---------------------------------------------------------------------------------


def halves(x):
    """The kernel's split, widened."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return [ptx.widths_tf32(y) for y in ptx.meaning(ptx.split_tf32).reference(None, bits)]


def by_chains(A, B, steps):
    """A B in chains of so many steps of 8, the smallest products first, and float32 between."""
    (A, a), (B, b) = halves(A), halves(B)
    total = np.zeros((A.shape[0], B.shape[1]), np.float32)
    for first in range(0, A.shape[1], 8 * steps):
        C = np.zeros_like(total)
        at = [slice(k, k + 8) for k in range(first, min(first + 8 * steps, A.shape[1]), 8)]
        for x, y in ((a, B), (A, b), (A, B)):
            for k in at:
                C = multiply_add(x[:, k], y[k], C)
        total += C
    return total


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_one_chain_over_all_keys_is_biased_and_short_chains_are_not(core):
    P, V = np.exp(normal(0, 32, 2048)), np.abs(normal(1, 2048, 16))
    wide = P.astype(np.float64) @ V
    rounded = np.abs(P @ V - wide).max()

    def error(steps):
        with truncated(core):
            return by_chains(P, V, steps) - wide

    assert (error(2048 // 8) < 0).all()  # toward zero, every one
    assert np.abs(error(2048 // 8)).max() > 20 * rounded
    assert np.abs(error(2)).max() <= 2 * rounded + ROUNDING * wide.max()


# ---- the kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
@settings(max_examples=4, deadline=None)
@given(
    n=st.integers(12, 16), s=st.integers(2, 70), d=st.sampled_from((8, 24, 64, 128)),
    e=st.sampled_from((8, 40, 64)), seed=st.integers(0, 2**32 - 1), is_causal=st.booleans(),
)  # fmt: skip
def test_any_shape_is_as_exact_as_float32(core, n, s, d, e, seed, is_causal):
    """Four heads: of a few values NumPy's error may be small by luck."""
    shapes = ((4, n, d), (4, max(n, s), d), (4, max(n, s), e))
    q, k, v = (normal(seed + i, *shape) for i, shape in enumerate(shapes))
    assert used(q, k, v, core, is_causal=is_causal) <= 1


def test_thousands_of_keys():
    q, k, v = normal(0, 16, 8), normal(1, 2100, 8), normal(2, 2100, 16)
    v[:, 8:] = np.abs(v[:, 8:])  # sums that grow
    for columns in (np.s_[:, :8], np.s_[:, 8:]):
        assert used(q, k, np.ascontiguousarray(v[columns]), block_k=64) <= 1


def test_large_scores_that_compete():
    """Pairs of keys so near each other that they share the weight, by the last bits of scores."""
    q, k, v = 1000 * normal(0, 32, 128), np.repeat(normal(1, 16, 128), 2, axis=0), normal(2, 32, 8)
    k[::2] += np.float32(2e-4) * normal(3, 16, 128)
    assert used(q, k, v) <= 1


@pytest.mark.parametrize("options", [{}, {"window_size": (0, 0)}])
def test_a_single_key_is_copied_to_the_last_bit(options):
    s = 40 if options else 1
    q, k, v = (normal(i, 40, 32)[: (40, s, s)[i]] for i in range(3))
    with truncated():
        done = attention(q, k, v, **options)
    done.report.check()
    assert (done.out == v).all()


@pytest.mark.parametrize("amplitude", [30.0, 1000.0])
def test_where_one_key_has_all_the_weight(amplitude):
    q, k, v = amplitude * normal(0, 32, 64), normal(1, 70, 64), normal(2, 70, 32)
    assert used(q, k, v) <= 1
