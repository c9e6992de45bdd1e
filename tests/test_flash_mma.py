"""The tensor-core kernel, under the emulator: values, semantics, counts, barriers; and compiled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

import ml_dtypes
from mutants import statements, without
from scores import KINDS, check_octaves, keys_of

import simattn
from kernels import flash_mma as module
from kernels import mma_tiles
from kernels._cuda import SIMULATOR
from kernels.emulated import attention
from kernels.emulator import Placed
from kernels.mma_layout import MmaLayout, Swizzle, layout_for, takes
from simattn import exact

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the emulator takes kernels meant for a GPU")
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
ONE_WARP = MmaLayout(16, 16, 1, 1, 16)


def small(
    d: int, e: int, warps: int = 2, row_tiles: int = 1, block_k: int = 32, dtype: str = "float16"
) -> MmaLayout:
    """Few rows a block, so that small problems have several tiles."""
    usual = layout_for(d, e, itemsize=DTYPES[dtype].itemsize)
    return replace(usual, warps=warps, row_tiles=row_tiles, block_k=block_k, min_blocks=1)


def inputs(dtype, n, s, d, e, *, lead=(), heads=1, kv_heads=1, amplitude=1.0, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((*lead, heads, n, d), (*lead, kv_heads, s, d), (*lead, kv_heads, s, e))
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return tuple(x.astype(DTYPES[dtype]) for x in (q * np.float32(amplitude), k, v))


def rounded_plain(q, k, v, L, *, scale=None, **mask):
    """Untiled attention in float32 with P rounded to storage: what any such kernel computes."""
    Q, K, V = (x.astype(np.float32) for x in (q, k, v))
    group = Q.shape[-3] // K.shape[-3]
    K, V = (np.repeat(x, group, axis=-3) for x in (K, V))
    n, s = Q.shape[-2], K.shape[-2]
    factor = np.float32(1 / np.sqrt(Q.shape[-1]) if scale is None else scale)
    left, right = mask.get("window_size", (-1, -1))
    right = 0 if mask.get("is_causal") else right
    ahead = np.arange(s) - (np.arange(n)[:, None] + s - n)
    hidden = (ahead > (n + s if right == -1 else right)) | (
        -ahead > (n + s if left == -1 else left)
    )
    blind = np.isneginf(L)[..., None]
    S = np.where(hidden, -np.inf, Q @ np.swapaxes(K, -1, -2) * factor)
    m = np.where(blind, 0, S.max(axis=-1, initial=-np.inf, keepdims=True))
    P = np.exp(S - m)
    l = np.where(blind, 1, P.sum(axis=-1, keepdims=True))
    return P.astype(q.dtype).astype(np.float32) @ V / l


def check(q, k, v, *, layout, dtype=None, **options):
    """Run, compare with float64, and compare the counts with the closed form."""
    mask = {x: options[x] for x in ("is_causal", "window_size") if x in options}
    scale = {"scale": options["scale"]} if "scale" in options else {}
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)  # poisoned
    done = attention(q, k, v, out=out, layout=layout, return_lse=True, **options)
    done.report.check()
    wide = [x.astype(np.float64) for x in (q, k, v)]
    right, L = exact.attention(*wide, **mask, **scale)
    other = rounded_plain(q, k, v, L, **mask, **scale)
    error = np.abs(done.out.astype(np.float64) - right).max(initial=0)
    rounding = EPS[q.dtype.name] / 2 * np.abs(right).max(initial=0)
    assert error <= 2 * np.abs(other - right).max(initial=0) + rounding
    seen = np.isfinite(L)
    assert (np.isneginf(done.lse) == ~seen).all()
    assert (done.out[~seen] == 0).all()
    largest = np.abs(L[seen]).max(initial=1)
    assert np.abs(done.lse[seen] - L[seen]).max(initial=0) <= 2e-6 * largest
    heads, kv_heads = (x.shape[-3] for x in (q, k))
    predicted = simattn.predict(
        "q_outer", n=q.shape[-2], n_k=k.shape[-2], d=q.shape[-1], dv=v.shape[-1], heads=heads,
        kv_heads=kv_heads, batch=int(np.prod(q.shape[:-3])), dtype=q.dtype.name,
        block_q=min(layout.block_q, q.shape[-2]), block_k=min(layout.block_k, k.shape[-2]),
        return_lse=True, **mask,
    )  # fmt: skip
    assert done.traffic == predicted.traffic
    return done


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "s", "d", "e"),
    [(33, 70, 64, 64), (1, 1, 8, 8), (16, 32, 16, 16), (40, 33, 40, 24), (20, 50, 72, 128),
     (31, 17, 128, 8), (10, 40, 256, 192)],
)  # fmt: skip
def test_every_shape_is_exact_and_moves_what_the_closed_form_says(n, s, d, e, dtype):
    q, k, v = inputs(dtype, n, s, d, e)
    check(q, k, v, layout=small(d, e, dtype=dtype))


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(width, "float16") for width in (8, 16, 24, 40, 72, 104, 136, 168, 200, 256)]
    + [(width, "float32") for width in (8, 48, 128, 248)],
)
def test_every_width_is_padded_in_shared_memory_only(width, dtype):
    q, k, v = inputs(dtype, 3, 20, width, width, seed=width)
    done = check(q, k, v, layout=small(width, width, block_k=16, dtype=dtype))
    assert done.report.shared.conflicts == 0 or (dtype == "float32" and width < 32)


@pytest.mark.parametrize(("n", "s"), [(40, 40), (20, 50), (50, 20), (1, 50), (50, 1)])
@pytest.mark.parametrize(
    "mask",
    [{"is_causal": True}, {"window_size": (10, 3)}, {"window_size": (0, 0)},
     {"window_size": (-1, 5)}, {"window_size": (40, -1)},
     {"is_causal": True, "window_size": (9, 9)}],
)  # fmt: skip
def test_masks(n, s, mask):
    q, k, v = inputs("float16", n, s, 16, 16)
    check(q, k, v, layout=small(16, 16, block_k=16), **mask)


@pytest.mark.parametrize("mask", [{"is_causal": True}, {"window_size": (10, 3)}])
def test_masks_in_float32(mask):
    q, k, v = inputs("float32", 50, 40, 16, 16)
    check(q, k, v, layout=small(16, 16, block_k=16, dtype="float32"), **mask)


@pytest.mark.parametrize("row_tiles", [1, 2])
@pytest.mark.parametrize("block_k", [16, 64])
@pytest.mark.parametrize("copies", ["early", "late"])
def test_tiles_warps_and_the_time_of_copies_make_no_difference(row_tiles, block_k, copies):
    q, k, v = inputs("bfloat16", 70, 100, 32, 32)
    layout = small(32, 32, warps=2, row_tiles=row_tiles, block_k=block_k)
    check(q, k, v, layout=layout, is_causal=True, copies=copies, backwards=copies == "early")


def test_heads_share_keys():
    q, k, v = inputs("float16", 20, 40, 16, 24, lead=(2,), heads=6, kv_heads=2)
    check(q, k, v, layout=small(16, 24), is_causal=True)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("width", [64, 128])
def test_the_shapes_used_on_a_gpu(width, dtype):
    layout = layout_for(width, width, itemsize=DTYPES[dtype].itemsize)
    q, k, v = inputs(dtype, layout.block_q // 2 + 3, layout.block_k + 20, width, width)
    done = check(q, k, v, layout=layout, is_causal=True)
    assert done.report.shared.conflicts == 0


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-44, 3.0])
def test_any_scale(scale):
    q, k, v = inputs("float16", 20, 40, 16, 16)
    check(q, k, v, layout=small(16, 16, block_k=16), scale=scale, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(dtype):
    q, k, v = inputs(dtype, 20, 60, 32, 16, amplitude=2000.0)
    done = check(q, k, v, layout=small(32, 16, block_k=16, dtype=dtype))
    assert np.abs(done.lse).max() > 3000


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_grow_jump_alternate_and_overflow(kind, dtype):
    q, k, v = inputs(dtype, 20, 200, 16, 16)
    options = {"layout": small(16, 16), "scale": 1.0, "window_size": (180, 40)}
    once = attention(q, 0 * k, v, **options).report.instructions["ldmatrix_x4"]
    q[..., 0] = 256
    k[0] = keys_of(kind, 200, 16, last_first=False)
    done = check(q, k, v, **options)
    again = done.report.instructions["ldmatrix_x4"] - once  # the others rise in the first tile only
    assert (again > 0) == (kind in ("grow", "jump", "alternate", "overflow float16"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_that_are_larger_than_their_octaves(dtype):
    check_octaves(attention, small(16, 16, block_k=16), DTYPES[dtype])


def test_the_largest_score_may_be_hidden():
    q, k, v = inputs("float16", 24, 140, 16, 16)
    q[..., 0], k[0, :, 0] = 64, 0
    k[0, 120:, 0] = 1000.0  # which the first rows do not see
    check(q, k, v, layout=small(16, 16, block_k=16), is_causal=True)


def test_views_keep_their_neighbours():
    big = inputs("float16", 30, 3 * 40, 64, 64, heads=2, kv_heads=2)
    q = big[0][:, ::2, 32:]
    k, v = big[1][:, :40, :32], big[2][:, 40:80, 16:48]
    out = np.full((2, 15, 48), np.nan, np.float16)[..., 8:40]
    done = attention(q, k, v, out=out, layout=small(32, 32))
    done.report.check()
    right, _ = exact.attention(*(x.astype(np.float64) for x in (q, k, v)))
    assert np.abs(out.astype(np.float64) - right).max() < 2e-3
    assert np.isnan(out.base[..., :8]).all()
    assert np.isnan(out.base[..., 40:]).all()


def test_offsets_need_64_bits():
    q, k, v = inputs("float16", 20, 40, 16, 16, lead=(2,), heads=2, kv_heads=2)
    far = (1 << 35, 1 << 34, 1 << 28, 1)  # elements: rows alone pass 2**31
    done = attention(Placed(q, far), Placed(k, far), Placed(v, far), layout=small(16, 16))
    done.report.check()
    right, _ = exact.attention(*(x.astype(np.float64) for x in (q, k, v)))
    assert np.abs(done.out.astype(np.float64) - right).max() < 2e-3


def test_L_is_written_on_request_only():
    q, k, v = inputs("float16", 20, 40, 16, 16)
    done = attention(q, k, v, layout=ONE_WARP)
    assert "L" not in done.report.check().tensors


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_hidden_key_takes_no_part_whatever_it_holds(poison, dtype):
    q, k, v = inputs(dtype, 24, 24, 16, 24)
    layout = small(16, 24, block_k=16, dtype=dtype)
    clean = attention(q, k, v, layout=layout, is_causal=True, return_lse=True)
    k[0, 17], v[0, 17], v[0, 20, 3] = poison, poison, poison
    done = attention(q, k, v, layout=layout, is_causal=True, return_lse=True)
    done.report.check()
    rows = np.s_[0, :17]
    np.testing.assert_allclose(done.out[rows], clean.out[rows].astype(np.float32), atol=2e-3)
    np.testing.assert_allclose(done.lse[rows], clean.lse[rows], rtol=0, atol=2e-6)
    assert not np.isfinite(done.out[0, 20:, 3]).any()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_visible_nan_spoils_its_rows_and_no_other(dtype):
    q, k, v = inputs(dtype, 20, 40, 16, 16)
    q[0, 7, 3] = np.nan
    done = attention(q, k, v, layout=small(16, 16, dtype=dtype), return_lse=True)
    done.report.check()
    others = np.arange(20) != 7
    assert np.isnan(done.out[0, 7]).all()
    assert np.isnan(done.lse[0, 7])
    assert np.isfinite(done.out[0, others]).all()
    assert np.isfinite(done.lse[0, others]).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scores_of_minus_infinity_weigh_nothing(dtype):
    q, k, v = inputs(dtype, 20, 40, 16, 16)
    q[0, :, 0], k[0, :, 0] = 1, 0
    k[0, :10, 0] = -np.inf
    done = attention(q, k, v, layout=small(16, 16, block_k=16, dtype=dtype), return_lse=True)
    done.report.check()
    right, L = exact.attention(
        *(x.astype(np.float64) for x in (q, k[:, 10:], v[:, 10:])), scale=0.25
    )
    assert np.abs(done.out.astype(np.float64) - right).max() < 2e-3
    assert np.abs(done.lse - L).max() < 1e-5
    k[0, :, 0] = -np.inf
    done = attention(q, k, v, layout=small(16, 16, block_k=16, dtype=dtype), return_lse=True)
    done.report.check()
    assert (done.out == 0).all()
    assert np.isneginf(done.lse).all()


def test_no_keys():
    q, k, v = inputs("float16", 20, 0, 16, 16)
    done = attention(q, k, v, layout=small(16, 16), return_lse=True)
    assert (done.report.check() and done.out == 0).all()
    assert np.isneginf(done.lse).all()


# ---- each barrier and wait is needed ------------------------------------------------------------

ORDERS = statements(r" +(cuda\.sync\w+\(\)|cp_async_wait_0\(\))", module, mma_tiles)


@pytest.mark.parametrize(("file", "line"), ORDERS)
def test_no_barrier_or_wait_can_be_left_out(file, line, tmp_path, monkeypatch):
    q, k, v = inputs("float16", 100, 50, 16, 16)  # the first row tile sees nothing
    layout = small(16, 16, block_k=16)
    attention(q, k, v, layout=layout, is_causal=True).report.check()
    mutant = without(file, line, tmp_path)
    if file is mma_tiles:
        monkeypatch.setattr(module, "words", mutant.words)
        mutant = module
    kernel = mutant.flash_mma(layout, "float16")
    done = attention(q, k, v, layout=layout, is_causal=True, kernel=kernel)
    assert done.report.kinds() & {"race", "in flight"}


def test_the_kernel_has_as_many_barriers_as_its_order_needs():
    assert len(ORDERS) == 5


# ---- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", range(2, 33, 2))
def test_a_swizzle_is_one_to_one_and_free_of_conflicts(chunks):
    swizzle = Swizzle(chunks)
    places = {swizzle.place(r, j) for r in range(16) for j in range(chunks)}
    assert places == set(range(16 * chunks))
    for j in range(chunks):
        assert len({swizzle.place(r, j) % 8 for r in range(8)}) == 8


@pytest.mark.parametrize(("capability", "most"), [((8, 6), 99), ((9, 0), 227)])
def test_layouts_fit_a_devices_shared_memory(capability, most):
    for d in range(8, 257, 8):
        for e in range(8, 257, 8):
            for itemsize in (2, 4):
                layout = layout_for(d, e, itemsize=itemsize, capability=capability)
                assert takes(d, e)
                assert layout.shared_bytes <= most * 1024
                assert layout.min_blocks * (layout.shared_bytes + 1024) <= (most + 1) * 1024
                assert (layout.d >= d, layout.e >= e) == (True, True)
    assert not takes(4, 8)
    assert not takes(264, 8)
    with pytest.raises(ValueError, match="at most 256"):
        layout_for(272, 8)
    with pytest.raises(ValueError, match="warps: 1 have too few threads for the 48 copies"):
        MmaLayout(16, 192, 1, 1, 16, itemsize=4)


@pytest.mark.parametrize(
    ("q", "taken"),
    [
        (np.zeros((2, 10, 64), np.float16), True),
        (np.zeros((2, 10, 60), np.float16), False),  # not in steps of 8
        (np.zeros((2, 10, 72), np.float16)[..., :64], True),
        (np.zeros((2, 10, 68), np.float16)[..., :64], False),  # rows 136 bytes apart
        (np.zeros((2, 10, 72), np.float16)[..., 4:68], False),  # begins in the middle of a chunk
        (np.zeros((2, 10, 68), np.float32)[..., :64], True),
        (np.zeros((2, 10, 264), np.float16), False),
    ],
)
def test_what_the_launcher_gives_to_tensor_cores(q, taken):
    from kernels import tensors
    from kernels.plans import refusal
    from kernels.problem import Problem

    view = tensors.view("q", q)
    offset = 0 if q.base is None else q.ctypes.data - q.base.ctypes.data
    view = replace(view, pointer=4096 + offset)  # as aligned as GPU memory
    if q.shape[-1] > 256:
        with pytest.raises(ValueError, match="width 264"):
            Problem.of(q.shape, q.shape, q.shape, q.dtype.name)
        return
    problem = Problem.of(q.shape, q.shape, q.shape, q.dtype.name)
    assert (refusal("mma", problem, [view], (8, 0)) == "") is taken
    assert "compute capability" in refusal("mma", problem, [view], (7, 5))


@pytest.mark.parametrize(("variant", "capability"), [("mma", (8, 0)), ("sm90", (9, 0))])
def test_numbers_of_rows_have_32_bits(variant, capability):
    from kernels.plans import MOST_ROWS, refusal
    from kernels.problem import Problem

    for n, s in ((MOST_ROWS - 1, 1), (1, MOST_ROWS - 1), (MOST_ROWS, 1), (1, MOST_ROWS)):
        problem = Problem.of((n, 16), (s, 16), (s, 16), "float16")
        assert ("at most" in refusal(variant, problem, [], capability)) is (n + s > MOST_ROWS)


@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"window_size": (9, 4)}])
def test_kernel_run_and_closed_form_count_the_same(mask):
    q, k, v = inputs("float16", 45, 70, 24, 40, lead=(2,), heads=2)
    layout = small(24, 40)
    tiles = {"block_q": layout.block_q, "block_k": layout.block_k}
    kernel = attention(q, k, v, layout=layout, return_lse=True, **mask)
    kernel.report.check()
    run = simattn.attention(q, k, v, variant="q_outer", return_lse=True, **tiles, **mask)
    predicted = simattn.predict(
        "q_outer", n=45, n_k=70, d=24, dv=40, heads=2, kv_heads=1, batch=2, dtype="float16",
        return_lse=True, **tiles, **mask,
    )  # fmt: skip
    assert kernel.traffic == run.traffic == predicted.traffic


def test_sectors_of_aligned_rows_are_the_bytes():
    """What Nsight Compute counts between L2 and the SMs, in units of 32 bytes."""
    q, k, v = inputs("float16", 45, 70, 64, 64)
    done = attention(q, k, v, layout=small(64, 64))
    done.report.check()
    for tensor in done.report.tensors.values():
        assert tensor.read_sectors * 32 == tensor.read_bytes
        assert tensor.write_sectors * 32 == tensor.write_bytes
