"""The kernels under Numba's CUDA simulator: exact, and counted to the element.

The simulator is chosen when Numba is imported, for a whole process: ``test_kernels_process.py``
runs this module in one of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1: test_kernels_process.py", allow_module_level=True)

import ml_dtypes
import tolerances
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from problems import problems

import kernels
import simattn
from kernels import check, cli, counting, flash_simt, tiles
from kernels.counting import Counted, simulate
from kernels.problem import DTYPES, VARIANTS
from simattn import exact
from simattn.bounds import error_bound
from simattn.dtypes import DTYPES as STORAGE

pytestmark = pytest.mark.cudasim
slow_draws = settings(suppress_health_check=[HealthCheck.too_slow])
NUMPY = {"bfloat16": ml_dtypes.bfloat16}
small_problems = problems(max_rows=14, variants=VARIANTS, dtypes=tuple(DTYPES))
thread_grids = st.sampled_from([(1, 1), (2, 2), (1, 2), (2, 1), (3, 2), (1, 4)])


def stored(p) -> list[np.ndarray]:
    """The inputs as arrays of the storage type."""
    dtype = p.options["dtype"]
    with np.errstate(over="ignore", under="ignore"):
        return [x.astype(NUMPY.get(dtype, dtype)) for x in (p.q, p.k, p.v)]


def shared_options(p) -> dict:
    """What both packages take."""
    return {name: x for name, x in p.options.items() if name not in ("splits", "dtype")}


def predicted(
    q, k, v, *, variant, block_q, block_k, is_causal, window_size, return_lse, scale=None
):
    heads, kv_heads = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k))
    return simattn.predict(
        variant, n=q.shape[-2], n_k=k.shape[-2], d=q.shape[-1], dv=v.shape[-1], heads=heads,
        kv_heads=kv_heads, batch=int(np.prod(q.shape[:-3])), block_q=block_q, block_k=block_k,
        is_causal=is_causal, window_size=window_size, dtype=q.dtype.name, return_lse=return_lse,
    )  # fmt: skip


@slow_draws
@given(small_problems, thread_grids)
def test_kernel_simattn_and_closed_form_count_the_same(p, threads) -> None:
    q, k, v = stored(p)
    run = simattn.attention(q, k, v, **shared_options(p))
    options = shared_options(p) | {"block_q": run.block_q, "block_k": run.block_k}
    kernel = simulate(q, k, v, threads=threads, **options)
    assert kernel.traffic == run.traffic
    assert kernel.traffic == predicted(q, k, v, **options).traffic


banded = st.fixed_dictionaries(  # several tiles a side, windows that end within a tile
    {
        "n": st.integers(1, 16),
        "s": st.integers(1, 16),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 2),
        "block_q": st.integers(1, 4),
        "block_k": st.integers(1, 4),
        "window_size": st.tuples(st.integers(-1, 5), st.integers(-1, 5)),
        "is_causal": st.booleans(),
    }
)
BAND = {"n": 8, "s": 8, "kv_heads": 2, "group": 1, "block_q": 2, "block_k": 2, "is_causal": False}


@slow_draws
@given(st.sampled_from(VARIANTS), banded, thread_grids)
@example("kv_outer", BAND | {"window_size": (0, 0)}, (1, 1))  # rows end at a tile's edge
@example("kv_outer", BAND | {"window_size": (2, 0)}, (2, 2))
@example("kv_outer", BAND | {"window_size": (1, -1), "n": 7, "block_k": 3}, (1, 1))
@example("kv_outer", BAND | {"window_size": (0, 2), "s": 12}, (1, 2))
@example("q_outer", BAND | {"window_size": (1, 0)}, (1, 1))  # keys begin and end at one
@example("q_outer", BAND | {"window_size": (0, 1), "s": 12}, (2, 1))
def test_tiles_outside_a_window_are_not_touched(variant, p, threads) -> None:
    heads = p["kv_heads"] * p["group"]
    q = np.ones((heads, p["n"], 2), np.float32)
    k, v = (np.ones((p["kv_heads"], p["s"], width), np.float32) for width in (2, 1))
    options = {"variant": variant, "return_lse": False} | {
        name: p[name] for name in ("block_q", "block_k", "window_size", "is_causal")
    }
    kernel = simulate(q, k, v, threads=threads, **options).traffic
    tiles = {"block_q": min(p["block_q"], p["n"]), "block_k": min(p["block_k"], p["s"])}
    assert kernel == simattn.attention(q, k, v, **options).traffic
    assert kernel == predicted(q, k, v, **options | tiles).traffic


@slow_draws
@given(small_problems, thread_grids)
def test_kernel_is_exact_attention(p, threads) -> None:
    q, k, v = stored(p)
    before = [x.copy() for x in (q, k, v)]
    run = simulate(q, k, v, threads=threads, **shared_options(p))
    mask = {name: p.options[name] for name in ("is_causal", "window_size", "scale")}
    values = [x.astype(np.float64) for x in (q, k, v)]
    out, lse = exact.attention(*values, **mask)
    out_bound, lse_bound = error_bound(
        *values, storage=STORAGE[p.options["dtype"]], variant=p.options["variant"],
        block_k=p.options["block_k"],
        scale=1 / np.sqrt(q.shape[-1]) if mask["scale"] is None else mask["scale"],
    )  # fmt: skip
    assert run.out.shape == out.shape
    assert run.out.dtype == q.dtype
    assert np.abs(run.out.astype(np.float64) - out).max(initial=0) <= out_bound
    if p.options["return_lse"]:
        blind = np.isneginf(lse)
        np.testing.assert_array_equal(np.isneginf(run.lse), blind)
        assert np.abs(run.lse[~blind] - lse[~blind]).max(initial=0) <= lse_bound
    for x, y in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_within_twice_that_of_plain_numpy(variant, dtype) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((33, 16)).astype(NUMPY.get(dtype, dtype)) for _ in range(3))
    run = simulate(q, k, v, variant=variant, block_q=8, block_k=8)
    values = [x.astype(np.float64) for x in (q, k, v)]
    options = {"scale": 0.25, "hidden": np.zeros((33, 33), bool)}
    allowed = tolerances.allowed(
        *values, storage=STORAGE[dtype], stores=5 if variant == "kv_outer" else 1, **options
    )
    error = np.abs(run.out.astype(np.float64) - tolerances.reference(*values, **options)).max()
    assert 0 < error <= allowed


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "case",
    [
        {"n": 21, "d": 16},
        {"n": 30, "d": 5, "s": 17, "e": 9, "is_causal": True},
        {"n": 12, "d": 8, "s": 25, "heads": 4, "kv_heads": 2, "window_size": (6, 2)},
        {"n": 9, "d": 8, "s": 40, "window_size": (0, -1), "dtype": "bfloat16"},
        {"n": 14, "d": 8, "batch": 2, "is_causal": True, "dtype": "float16"},
    ],
    ids=str,
)
def test_the_gpu_check_passes_what_the_simulator_computes(variant, case) -> None:
    case = check.Case(variant, **case, block_q=8, block_k=8)
    q, k, v = check.inputs(case)
    mask = {"is_causal": case.is_causal, "window_size": case.window_size}
    run = simulate(q, k, v, variant=variant, return_lse=True, **mask)
    outcome = check.compare(case, (q, k, v), run.out, run.lse, 8)
    assert outcome.passed, outcome
    assert outcome.out_error > 0
    for wrong in (np.nan, 1.0):
        damaged = run.out.copy()
        damaged[..., -1, -1] += wrong
        assert not check.compare(case, (q, k, v), damaged, run.lse, 8).passed


WITNESS = json.loads((Path(__file__).parent / "traffic_witness.json").read_text())


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernel_counts_what_the_witness_counted(variant) -> None:
    cases = [c for c in WITNESS if c["variant"] == variant and c["n"] * c["s"] * c["d"] <= 6000]
    assert cases
    for c in cases[:8]:
        q, k, v = (
            np.ones(shape, np.float32)
            for shape in ((c["n"], c["d"]), (c["s"], c["d"]), (c["s"], c["e"]))
        )
        traffic = simulate(
            q, k, v, variant=variant, block_q=c["block_q"], block_k=c["block_k"],
            is_causal=c["causal"],
        ).traffic  # fmt: skip
        assert traffic.reads == {name: x for name, x in c["reads"].items() if x}
        assert traffic.writes == {name: x for name, x in c["writes"].items() if x}


@slow_draws
@given(st.data())
def test_hidden_keys_take_no_part_whatever_they_hold(data) -> None:
    n, s = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 14))
    variant = data.draw(st.sampled_from(VARIANTS))
    mask = {
        "is_causal": data.draw(st.booleans()),
        "window_size": data.draw(st.tuples(st.integers(-1, 4), st.integers(-1, 4))),
    }
    tiles = {"block_q": data.draw(st.integers(1, 6)), "block_k": data.draw(st.integers(1, 6))}
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    q, k, v = (rng.standard_normal((rows, 3)).astype(np.float32) for rows in (n, s, s))
    poisoned = data.draw(st.integers(0, s - 1))
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[poisoned], bad_v[poisoned] = np.nan, data.draw(st.sampled_from([np.nan, np.inf]))

    clean = simulate(q, k, v, variant=variant, return_lse=True, **tiles, **mask)
    dirty = simulate(q, bad_k, bad_v, variant=variant, return_lse=True, **tiles, **mask)
    right, right_lse = exact.attention(q, bad_k, bad_v, **mask)
    sees = np.isnan(right_lse)
    np.testing.assert_array_equal(np.isnan(dirty.lse), sees)
    np.testing.assert_array_equal(np.isnan(dirty.out), np.isnan(right))
    np.testing.assert_array_equal(dirty.out[~sees], clean.out[~sees])
    np.testing.assert_array_equal(dirty.lse[~sees], clean.lse[~sees])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block_k", [1, 3, 8])
def test_infinite_scores(variant, block_k) -> None:
    """A score of -inf weighs 0; a row of nothing else is 0; +inf and NaN make their row NaN."""
    q = np.array([[1.0], [2.0], [-1.0], [0.0]], np.float32)
    k = np.array([[-np.inf], [1.0], [-np.inf], [2.0], [-np.inf]], np.float32)
    v = np.arange(5, dtype=np.float32)[:, None]
    run = simulate(q, k, v, variant=variant, block_q=2, block_k=block_k, scale=1.0, return_lse=True)
    right, right_lse = exact.attention(q, k, v, scale=1.0)
    ends = slice(0, 2)  # the rows without a NaN
    values = [x.astype(np.float64) for x in (q[ends], k, v)]
    stores = -(-5 // block_k) if variant == "kv_outer" else 1
    allowed = tolerances.allowed(
        *values, scale=1.0, hidden=np.zeros((2, 5), bool), storage=STORAGE["float32"],
        stores=stores,
    )  # fmt: skip
    np.testing.assert_array_equal(np.isnan(run.out), np.isnan(right))
    assert np.abs(run.out[ends] - right[ends]).max() <= allowed
    scores = q[ends] @ k.T
    plain_lse = np.log(np.exp(scores - 4).sum(axis=-1)) + np.float32(4)
    eps = np.finfo(np.float32).eps
    lse_allowed = (
        2 * np.abs(plain_lse - right_lse[ends]).max() + eps * np.abs(right_lse[ends]).max()
    )
    np.testing.assert_array_equal(np.isnan(run.lse), np.isnan(right_lse))
    assert np.abs(run.lse[ends] - right_lse[ends]).max() <= lse_allowed
    for values in (v[:2], np.array([[np.nan], [1]]), np.array([[np.inf], [-np.inf]])):
        only = simulate(
            q[:1], k[[0, 2]], values.astype(np.float32), variant=variant, block_q=2,
            block_k=block_k, return_lse=True,
        )  # fmt: skip
        assert only.out.tolist() == [[0.0]]
        assert only.lse.tolist() == [-np.inf]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("n", "s", "heads"), [(0, 3, 2), (3, 0, 2), (0, 0, 1), (3, 3, 0)], ids=str)
def test_nothing_to_compute(variant, n, s, heads) -> None:
    q, k, v = (np.ones((2, heads, rows, 4), np.float16) for rows in (n, s, s))
    run = simulate(q, k, v, variant=variant, return_lse=True)
    assert run.out.shape == (2, heads, n, 4)
    assert not run.out.any()
    assert np.isneginf(run.lse).all() or (s and not run.lse.size)


@slow_draws
@given(small_problems)
def test_flash_attention_is_the_kernel(p) -> None:
    q, k, v = stored(p)
    options = shared_options(p)
    run = simulate(q, k, v, **options)
    out = np.full_like(run.out, np.nan)
    got = kernels.flash_attention(q, k, v, out=out, **options)
    if options["return_lse"]:
        got, lse = got
        np.testing.assert_array_equal(lse, run.lse)
    assert got is out
    np.testing.assert_array_equal(out, run.out)


def test_numpy_arrays_of_any_strides_and_byte_order(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((2, 20, 16)).astype(np.float32)
    q, k, v = wide[:, ::2, ::2], wide[:, ::-1, 1::2], np.asfortranarray(wide[..., :5])
    expected = kernels.flash_attention(*(np.ascontiguousarray(x) for x in (q, k, v)))
    np.testing.assert_array_equal(kernels.flash_attention(q, k, v), expected)
    swapped = [x.astype(">f4") for x in (q, k, v)]
    given_arrays = []
    honest = counting.run
    monkeypatch.setattr(
        counting,
        "run",
        lambda p, arrays, *rest: given_arrays.extend(arrays) or honest(p, arrays, *rest),
    )
    result = kernels.flash_attention(*swapped)
    assert all(x.dtype.isnative for x in given_arrays)
    assert len(given_arrays) == 3
    np.testing.assert_array_equal(result, expected)
    frozen = [x.copy() for x in (q, k, v)]
    for x in frozen:
        x.flags.writeable = False
    np.testing.assert_array_equal(kernels.flash_attention(*frozen), expected)
    out = np.zeros((10, 2, 7), np.float32).transpose(1, 0, 2)[..., :5]
    assert kernels.flash_attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_the_simulator_takes_numpy_arrays_alone() -> None:
    from numba import cuda

    x = np.ones((2, 4), np.float32)
    with pytest.raises(TypeError, match="q: the simulator takes NumPy arrays, not FakeCUDAArray"):
        kernels.flash_attention(cuda.to_device(x), x, x)
    for stream in (-1, 2**64, True, "fast"):
        with pytest.raises((TypeError, ValueError), match="stream: "):
            kernels.flash_attention(x, x, x, stream=stream)
    np.testing.assert_array_equal(kernels.flash_attention(x, x, x, stream=cuda.stream()), x)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_behind_infinite_scores_are_simattns(variant, bad) -> None:
    """0 * NaN is NaN in a row that has weight elsewhere; 0 in one that has none."""
    q = np.ones((1, 1), np.float32)
    for position in range(4):
        k = np.full((4, 1), -np.inf, np.float32)
        v = np.full((4, 1), bad, np.float32)
        for weight in (False, True):
            if weight:
                k[position], v[position] = 1, 1
            for block_k in (1, 3, 4):
                tiles = {"variant": variant, "block_q": 1, "block_k": block_k, "scale": 1.0}
                with np.errstate(invalid="ignore"):
                    expected = simattn.attention(q, k, v, **tiles).out
                np.testing.assert_array_equal(simulate(q, k, v, **tiles).out, expected)
        assert np.isnan(expected).all()  # one tile: exact attention


def test_many_threads_share_the_simulator() -> None:
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = (np.ones((5, 4), np.float32) * x for x in (1, 2, 3))
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda _: kernels.flash_attention(q, k, v), range(8)))
    for out in outs:
        np.testing.assert_array_equal(out, v)


def test_counting_arrays_count_and_refuse_what_lies_outside() -> None:
    array = Counted(np.zeros((2, 3), np.float32))
    array[0] = 1
    assert array[0] + array[5] == 1
    assert (array.reads, array.writes) == (2, 1)
    for index in (-1, 6):
        with pytest.raises(IndexError, match="element"):
            array[index]
        with pytest.raises(IndexError, match="element"):
            array[index] = 0


def test_a_kernel_that_loads_a_tile_twice_is_noticed(monkeypatch) -> None:
    """The counts are the kernel's own, not the model's."""

    def careless(*args):
        words = honest(*args)
        load_Q = words.load_Q

        def twice(*args):
            load_Q(*args)
            load_Q(*args)

        words.load_Q = twice
        return words

    q, k, v = (np.ones((3, 2), np.float32) for _ in range(3))
    assert simulate(q, k, v).traffic.reads["Q"] == 6
    honest = flash_simt.words
    monkeypatch.setattr(flash_simt, "words", careless)
    assert simulate(q, k, v).traffic.reads["Q"] == 12


def test_bfloat16_is_rounded_as_ml_dtypes_rounds() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32)
    edges = [0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 1]
    for x in np.concatenate([bits, np.array(edges, np.uint32)]).view(np.float32):
        with np.errstate(all="ignore"):
            got = tiles.bfloat_to_float(tiles.float_to_bfloat(x))
            expected = np.float32(ml_dtypes.bfloat16(x))
        assert got == expected or (np.isnan(got) and np.isnan(expected))


def run_cli(argv: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.main(["traffic", *argv.split()])
    return code, printed.getvalue()


def test_traffic_command_prints_three_equal_counts() -> None:
    code, text = run_cli("--n 37 --d 8 --block-q 8 --block-k 4 --variant q_outer --format json")
    report = json.loads(text)
    assert code == 0
    assert report["equal"] is True
    assert report["kernel"] == report["simattn"] == report["closed_form"]
    # Q once; 5 row tiles, each reads K and V [37, 8]
    assert report["kernel"]["reads"] == {"Q": 37 * 8, "K": 5 * 37 * 8, "V": 5 * 37 * 8}
    assert report["kernel"]["writes"] == {"O": 37 * 8}
    assert report["kernel"]["read_elems"] == 11 * 37 * 8
    assert report["kernel"]["write_bytes"] == 4 * 37 * 8


def test_traffic_command_as_text() -> None:
    code, text = run_cli(
        "--n 9 --n-k 12 --d 4 --dv 3 --heads 4 --kv-heads 2 --batch 2 --causal --window 5,-1 "
        "--dtype bfloat16 --variant kv_outer --block-q 4 --block-k 4 --lse"
    )
    assert code == 0
    assert text.splitlines()[-1] == "equal"
    assert text.splitlines()[1].split() == ["elements", "kernel", "simattn", "closed_form"]
    for line in text.splitlines()[2:-1]:
        assert len(set(line.split()[-3:])) == 1


def test_traffic_command_reports_a_difference(monkeypatch) -> None:
    from kernels import traffic

    honest = traffic.simulate
    monkeypatch.setattr(
        traffic, "simulate", lambda q, k, v, **o: honest(q, k, v, **(o | {"return_lse": True}))
    )
    code, text = run_cli("--n 4")
    assert code == 1
    assert text.splitlines()[-1] == "DIFFERENT"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--n 5000 --d 64", "n: "),
        ("--heads 3 --kv-heads 2", "2 heads must divide q's 3 heads"),
        ("--window=-2,0", "window_size: (-2, 0) must not go below -1"),
        ("--window -2,0", "window_size: (-2, 0) must not go below -1"),
        ("--n 300 --d 1 --block-q 1 --block-k 1", "block_q, block_k: 90000 pairs of tiles"),
        ("--n 1 --d 1 --batch 9000", "9000 pairs of tiles are too many to simulate"),
        ("--d 300", "width 300 must be 1 to 256"),
    ],
)
def test_traffic_command_refuses_in_one_line(argv, message, capsys) -> None:
    assert cli.main(["traffic", *argv.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
