"""The Hopper kernel under the emulator: values, semantics, maxima, counts, barriers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

import ml_dtypes
from mutants import statements, without
from scores import KINDS, check_octaves, keys_of

import simattn
from kernels import flash_sm90 as module
from kernels import sm90_tiles
from kernels._cuda import SIMULATOR
from kernels.emulated import attention
from kernels.emulator import KernelFaultError, Placed
from kernels.emulator.warp import Warp
from kernels.mma_layout import takes
from kernels.sm90_layout import LAYOUTS, Sm90Layout, layout_for
from kernels.sm90_schedule import END
from simattn import exact

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the emulator takes kernels meant for a GPU")
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def small(d=64, e=64, groups=1, block_k=32, early=2, **options) -> Sm90Layout:
    """Few rows a tile, so that small problems have several."""
    whole = [-(-width // 16) * 16 for width in (d, e)]
    return Sm90Layout(*whole, groups, block_k, early=early, **options)


def inputs(n, s, d=64, e=64, *, dtype="float16", lead=(), heads=1, kv_heads=1, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((*lead, heads, n, d), (*lead, kv_heads, s, d), (*lead, kv_heads, s, e))
    return tuple(rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)


def rounded_plain(q, k, v, L, hidden, scale):
    """Untiled attention in float32 with P rounded to storage: what any such kernel computes."""
    Q, K, V = (x.astype(np.float32) for x in (q, k, v))
    K, V = (np.repeat(x, Q.shape[-3] // K.shape[-3], axis=-3) for x in (K, V))
    S = np.where(hidden, -np.inf, Q @ np.swapaxes(K, -1, -2) * np.float32(scale))
    blind = np.isneginf(L)[..., None]
    m = np.where(blind, 0, S.max(axis=-1, initial=-np.inf, keepdims=True))
    P = np.exp(S - m)
    l = np.where(blind, 1, P.sum(axis=-1, keepdims=True))
    return P.astype(q.dtype).astype(np.float32) @ V / l


def hidden_pairs(n, s, is_causal=False, window_size=(-1, -1)):
    left, right = window_size
    right = 0 if is_causal else right
    ahead = np.arange(s) - (np.arange(n)[:, None] + s - n)
    return (ahead > (n + s if right == -1 else right)) | (-ahead > (n + s if left == -1 else left))


def check(q, k, v, *, layout, **options):
    """Run, compare with float64, and compare the counts with the closed form."""
    mask = {x: options[x] for x in ("is_causal", "window_size") if x in options}
    scale = options.get("scale", 1 / np.sqrt(q.shape[-1]))
    n, s, e = q.shape[-2], k.shape[-2], v.shape[-1]
    out = np.full((*q.shape[:-1], e), np.nan, q.dtype)  # poisoned
    done = attention(q, k, v, out=out, layout=layout, return_lse=True, **options)
    done.report.check()
    wide = [x.astype(np.float64) for x in (q, k, v)]
    right, L = exact.attention(*wide, scale=scale, **mask)
    other = rounded_plain(q, k, v, L, hidden_pairs(n, s, **mask), scale)
    error = np.abs(done.out.astype(np.float64) - right).max(initial=0)
    rounding = EPS[q.dtype.name] / 2 * np.abs(right).max(initial=0)
    assert error <= 2 * np.abs(other - right).max(initial=0) + rounding
    seen = np.isfinite(L)
    assert (np.isneginf(done.lse) == ~seen).all()
    assert (done.out[~seen] == 0).all()
    assert np.abs(done.lse[seen] - L[seen]).max(initial=0) <= 2e-6 * np.abs(L[seen]).max(initial=1)
    predicted = simattn.predict(
        "q_outer", n=n, n_k=s, d=q.shape[-1], dv=e, heads=q.shape[-3], kv_heads=k.shape[-3],
        batch=int(np.prod(q.shape[:-3])), dtype=q.dtype.name, return_lse=True,
        block_q=min(layout.block_q, n), block_k=min(layout.block_k, s), **mask,
    )  # fmt: skip
    assert done.traffic == predicted.traffic
    assert done.report.shared.conflicts == 0
    return done


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "s", "d", "e"),
    [(70, 70, 64, 64), (1, 1, 16, 16), (130, 33, 40, 24), (20, 70, 72, 128), (65, 32, 128, 16),
     (10, 70, 256, 192)],
)  # fmt: skip
def test_every_shape_is_exact_and_moves_what_the_closed_form_says(n, s, d, e, dtype):
    check(*inputs(n, s, d, e, dtype=dtype), layout=small(d, e))


@pytest.mark.parametrize("width", [16, 56, 80, 136, 200, 256])
def test_widths_are_padded_in_shared_memory_only(width):
    check(*inputs(3, 40, width, width, seed=width), layout=small(width, width, block_k=16))


@pytest.mark.parametrize(("n", "s"), [(34, 34), (20, 60), (70, 20)])
@pytest.mark.parametrize(
    "mask",
    [{"is_causal": True}, {"window_size": (10, 3)}, {"window_size": (0, 0)},
     {"window_size": (-1, 5)}, {"window_size": (50, -1)},
     {"is_causal": True, "window_size": (40, 9)}],
)  # fmt: skip
def test_masks(n, s, mask):
    check(*inputs(n, s, 16, 16), layout=small(16, 16, block_k=16), **mask)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("maxima", ["fast", "exact"])
def test_the_time_of_copies_and_the_order_of_warps_make_no_difference(copies, maxima, backwards):
    layout = small(16, 16, groups=2, maxima=maxima, stages=3)
    q, k, v = inputs(130, 100, 16, 16)
    check(q, k, v, layout=layout, is_causal=True, copies=copies, backwards=backwards, blocks=1)


@pytest.mark.parametrize("copies", ["late", "early"])
@pytest.mark.parametrize("maxima", ["fast", "exact"])
@pytest.mark.parametrize("n", [1, 64, 65, 128, 129, 192, 193, 257])
def test_warpgroups_without_rows_sit_out(n, maxima, copies):
    q, k, v = inputs(n, 100, 16, 16, heads=3)
    layout = small(16, 16, groups=3, stages=3, maxima=maxima)
    done = check(q, k, v, layout=layout, copies=copies, blocks=1)
    stays = check(q, k, v, layout=replace(layout, sits_out=False), copies=copies, blocks=1)
    np.testing.assert_array_equal(done.out, stays.out)
    np.testing.assert_array_equal(done.lse, stays.lse)
    assert stays.report.instructions["stmatrix_x4"] == 3 * -(-n // 192) * 3 * 4
    warps = 3 * sum(-(-min(192, n - row) // 64) for row in range(0, n, 192)) * 4
    assert done.report.instructions["stmatrix_x4"] == warps


def test_a_warpgroup_that_sits_out_needs_as_many_stages_as_there_are_warpgroups():
    """With two stages of three warpgroups, the second one may be ahead of the third's release."""
    layout = small(16, 16, groups=3, stages=3, block_k=16)
    object.__setattr__(layout, "stages", 2)  # which it refuses
    q, k, v = inputs(256, 64, 16, 16)
    report = attention(q, k, v, layout=layout, table=np.array([[0, 1, END]], np.uint32)).report
    assert any("may count for the phase before" in fault.detail for fault in report.faults)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"groups": 4}, "groups: 4"), ({"block_k": 40}, "block_k: 40"),
        ({"groups": 3}, "stages: 2 must be"), ({"stages": 1, "sits_out": False}, "stages: 1"),
        ({"q_stages": 0}, "q_stages: 0"), ({"early": 9}, "early: 9"), ({"early": -1}, "early: -1"),
        ({"maxima": "fsat"}, "maxima: 'fsat'"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_run_is_refused(options, named):
    given = {"groups": 2, "block_k": 64} | options
    with pytest.raises(ValueError, match=named):
        Sm90Layout(64, 64, **given)


@pytest.mark.parametrize("q_stages", [1, 2])
def test_heads_share_keys(q_stages):
    q, k, v = inputs(20, 40, 16, 24, lead=(2,), heads=4, kv_heads=2)
    layout = small(16, 24, q_stages=q_stages)
    check(q, k, v, layout=layout, is_causal=True, blocks=3)


@pytest.mark.parametrize("shape", range(len(LAYOUTS)))
def test_the_shapes_used_on_a_gpu(shape):
    d, e, _, _, options = LAYOUTS[shape]
    layout = Sm90Layout(d, e, **options)
    q, k, v = inputs(70, 2 * layout.block_k + 20, d, e)
    check(q, k, v, layout=layout, is_causal=shape % 2 == 0)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-44, 3.0])
def test_any_scale(scale):
    q, k, v = inputs(20, 60, 16, 16)
    check(q, k, v, layout=small(16, 16, block_k=16), scale=scale, is_causal=True)


def test_no_keys():
    done = attention(*inputs(20, 0), layout=small(), return_lse=True)
    done.report.check()
    assert (done.out == 0).all()
    assert np.isneginf(done.lse).all()


def test_L_is_written_on_request_only():
    done = attention(*inputs(20, 40), layout=small())
    assert "L" not in done.report.check().tensors


def test_views_keep_their_neighbours():
    big = inputs(60, 3 * 40, heads=2, kv_heads=2)
    q = big[0][:, ::2, 32:]
    k, v = big[1][:, :40, :32], big[2][:, 40:80, 16:48]
    out = np.full((2, 30, 48), np.nan, np.float16)[..., 8:40]
    attention(q, k, v, out=out, layout=small(32, 32)).report.check()
    right, _ = exact.attention(*(x.astype(np.float64) for x in (q, k, v)))
    assert np.abs(out.astype(np.float64) - right).max() < 2e-3
    assert np.isnan(out.base[..., :8]).all()
    assert np.isnan(out.base[..., 40:]).all()


def test_offsets_need_64_bits():
    q, k, v = inputs(20, 40, 16, 16, lead=(2,), heads=2, kv_heads=2)
    far = (1 << 35, 1 << 34, 1 << 28, 1)  # elements: rows alone pass 2**31
    done = attention(Placed(q, far), Placed(k, far), Placed(v, far), layout=small(16, 16))
    done.report.check()
    right, _ = exact.attention(*(x.astype(np.float64) for x in (q, k, v)))
    assert np.abs(done.out.astype(np.float64) - right).max() < 2e-3


# ---- maxima -------------------------------------------------------------------------------------


AGAIN = ("grow", "alternate", "overflow float16")  # the others rise in the first tiles only


@pytest.mark.parametrize("maxima", ["fast", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_grow_jump_alternate_and_overflow(kind, maxima):
    q, k, v = inputs(20, 200, 16, 16)
    q[..., 0] = 256
    k[0] = keys_of(kind, 200, 16, last_first=True)
    layout = small(16, 16, maxima=maxima)
    done = check(q, k, v, layout=layout, scale=1.0, window_size=(150, 40))
    again = done.report.instructions["mma_f16"]
    assert (again > 0) == (maxima == "fast" and kind in AGAIN)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_that_are_larger_than_their_octaves(dtype):
    check_octaves(attention, small(16, 16, block_k=16), DTYPES[dtype])


def test_the_largest_score_may_be_hidden():
    q, k, v = inputs(70, 140, 16, 16)
    q[..., 0], k[0, :, 0] = 64, 0
    k[0, 110:, 0] = 1000.0  # of the last 30 keys the first 40 rows see none
    done = check(q, k, v, layout=small(16, 16), scale=1.0, is_causal=True)
    assert done.lse[0, 0] < 1000 < done.lse[0, -1]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_hidden_key_takes_no_part_whatever_it_holds(poison):
    q, k, v = inputs(20, 20, 16, 24)
    layout = small(16, 24, block_k=16)
    clean = attention(q, k, v, layout=layout, is_causal=True, return_lse=True)
    k[0, 15], v[0, 15], v[0, 17, 3] = poison, poison, poison
    done = attention(q, k, v, layout=layout, is_causal=True, return_lse=True)
    done.report.check()
    rows = np.s_[0, :15]
    np.testing.assert_allclose(done.out[rows], clean.out[rows].astype(np.float32), atol=2e-3)
    np.testing.assert_allclose(done.lse[rows], clean.lse[rows], rtol=0, atol=2e-6)
    assert not np.isfinite(done.out[0, 17:, 3]).any()


def test_a_visible_nan_spoils_its_rows_and_no_other():
    q, k, v = inputs(20, 40, 16, 16)
    q[0, 7, 3] = np.nan
    done = attention(q, k, v, layout=small(16, 16), return_lse=True)
    done.report.check()
    others = np.arange(20) != 7
    assert np.isnan(done.out[0, 7]).all()
    assert np.isnan(done.lse[0, 7])
    assert np.isfinite(done.out[0, others]).all()
    assert np.isfinite(done.lse[0, others]).all()


@pytest.mark.parametrize("least", [10, 40, 100])
def test_scores_of_minus_infinity_weigh_nothing(least):
    q, k, v = inputs(20, 100, 16, 16)
    q[0, :, 0], k[0, :, 0] = 1, 0
    k[0, :least, 0] = -np.inf
    done = attention(q, k, v, layout=small(16, 16), return_lse=True)
    done.report.check()
    right, L = exact.attention(
        *(x.astype(np.float64) for x in (q, k[:, least:], v[:, least:])), scale=0.25
    )
    assert np.abs(done.out.astype(np.float64) - right).max() < 2e-3
    assert (np.isneginf(done.lse) == np.isneginf(L)).all()
    assert least == 100 or np.abs(done.lse - L).max() < 1e-5


# ---- each barrier and wait is needed -------------------------------------------------------------

ORDERS = statements(  # not the turns, which save time and order nothing
    r" +(cuda\.sync\w+|mbar_\w+|fence_async|wgmma_fence|wait_\w+|stores_\w+|release)\("
    r"| +await_turn\(warp\)  # read-write",
    module, sm90_tiles,
)  # fmt: skip


LEAST = small(16, 16, block_k=16, early=1, q_stages=1)
PAIR = small(16, 16, groups=2, block_k=16, early=1)


def everything(**options):
    """A run that takes every way through the kernel, in one block: rows 64 on, 128 on, and then the
    first ones, which see nothing.

    Of rows 128 on three tiles are done again, so that a stage is used anew while its K is read. The
    last item has fewer tiles than there are stages: else the producer would hear from a stage that
    the slot which it writes at the end has been read.
    """
    q, k, v = inputs(130, 49, 16, 16)
    q[..., 0] = 16
    k[0, :, 0] = np.arange(49)[::-1] / 2  # maxima that grow
    v[0, 48] = np.inf  # which the last row sees, and the one before it, in the same tile, doesn't
    table = np.array([[1, 2, 0, END]], np.uint32)
    return attention(q, k, v, layout=LEAST, is_causal=True, table=table, **options)


def test_the_problem_takes_every_way():
    done = everything()
    used = done.report.check().instructions
    assert used["mma_f16"] > 0
    assert used["ld_global_b32_written"] > 0
    assert used["st_global_b16"] > 0


def sitting_out(**options):
    """Items of two warpgroups; the second has no rows of the first, the third and the last item."""
    q, k, v = inputs(130, 100, 16, 16, heads=3)
    table = np.array([[1, 0, 3, 2, 4, 5, END]], np.uint32)
    return attention(q, k, v, layout=PAIR, table=table, **options)


def stop(warp, kind, detail):
    """In place of `Warp.fault`: one is enough."""
    raise KernelFaultError(f"{kind}: {detail}")


def is_found(run, kernel, copies) -> bool:
    try:
        return not run(kernel=kernel, copies=copies).report.ok
    except KernelFaultError:
        return True


@pytest.mark.parametrize(("file", "line"), ORDERS)
def test_no_barrier_or_wait_can_be_left_out(file, line, tmp_path, monkeypatch):
    mutant = without(file, line, tmp_path)
    if file is sm90_tiles:
        monkeypatch.setattr(module, "words", mutant.words)
        mutant = module
    monkeypatch.setattr(Warp, "fault", stop)
    assert any(
        is_found(run, mutant.flash_sm90(layout, "float16"), copies)
        for layout, run in ((LEAST, everything), (PAIR, sitting_out))
        for copies in ("late", "early")
    )


# ---- layouts and counts --------------------------------------------------------------------------


def test_layouts_fit_shared_memory_and_registers():
    for d in range(8, 257, 8):
        for e in range(8, 257, 8):
            for rows in (1000, 100_000):
                layout = layout_for(d, e, n=rows, s=rows)
                assert takes(d, e)
                assert layout.shared_bytes <= 227 * 1024
                assert (layout.d >= d, layout.e >= e) == (True, True)
                moved = layout.producer_registers + layout.groups * layout.consumer_registers
                assert moved <= (layout.groups + 1) * layout.launch_registers
    assert not takes(4, 8)
    assert not takes(264, 8)
    with pytest.raises(ValueError, match="at most 256"):
        layout_for(272, 8, n=1, s=1)


def test_sectors_are_those_of_whole_boxes():
    """What Nsight Compute counts between L2 and the SMs, in units of 32 bytes."""
    q, k, v = inputs(100, 70, 80, 64)
    layout = small(80, 64)
    done = attention(q, k, v, layout=layout)
    tensors = done.report.check().tensors
    assert tensors["Q"].read_sectors * 32 == 2 * layout.Q_bytes
    assert tensors["K"].read_sectors * 32 == 2 * 3 * layout.K_bytes
    assert tensors["V"].read_sectors * 32 == 2 * 3 * layout.V_bytes
    assert tensors["O"].write_sectors * 32 == tensors["O"].write_bytes
