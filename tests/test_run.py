"""The public edge: bad input, capacity, memory that stays linear, threads."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from problems import Problem, problems

import simattn
from simattn import SRAMCapacityError, attention, row_softmax
from simattn.variants import VARIANTS

X = np.ones((2, 4, 8), np.float32)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"q": X[0, 0]}, ValueError, r"q \(8,\), k .*: must have equally many dimensions"),
        ({"q": X[0]}, ValueError, "must have equally many dimensions"),
        ({"k": X[:, :, :7]}, ValueError, r"k \(2, 4, 7\).*same width"),
        ({"q": X[..., :0], "k": X[..., :0]}, ValueError, "no width may be 0"),
        ({"v": X[..., :0]}, ValueError, "no width may be 0"),
        ({"v": X[:, :3]}, ValueError, r"v \(2, 3, 8\): k and v must have the same heads and rows"),
        ({"q": np.ones((3, 4, 8), "f4")}, ValueError, "the 2 heads of k must divide the 3 of q"),
        ({"k": X[:0], "v": X[:0]}, ValueError, "the 0 heads of k must divide the 2 of q"),
        (
            {"q": X[None], "k": np.ones((3, 2, 4, 8), "f4"), "v": X[None]},
            ValueError,
            "batch dimensions",
        ),
        ({"q": X.astype("f2")}, TypeError, "q float16, k float32, v float32: must have one dtype"),
        ({"q": X.astype(int)}, TypeError, "q has dtype int64: must be one of float16"),
        ({"k": X.astype(complex)}, TypeError, "k has dtype complex128"),
        ({"q": np.ma.masked_array(X)}, TypeError, "q: masked arrays"),
        ({"q": [["a"]]}, TypeError, "q has dtype str"),
        ({"q": [[1.0], [1.0, 2.0]]}, ValueError, "q: must be an array"),
        ({"variant": "flash"}, ValueError, "variant 'flash': must be one of standard_safe"),
        ({"softcap": 30.0}, ValueError, "softcap 30.0: not available yet"),
        ({"scale": np.nan}, ValueError, "scale nan: must be a finite number"),
        ({"scale": "big"}, ValueError, "scale 'big': must be a finite number"),
        ({"window_size": (-2, 0)}, ValueError, r"window_size \(-2, 0\)"),
        ({"window_size": 3}, ValueError, "window_size 3: must be two whole numbers"),
        ({"window_size": (1.5, 0)}, ValueError, "window_size"),
        ({"block_q": 0}, ValueError, "block_q 0: must be a whole number, at least 1"),
        ({"block_k": -4}, ValueError, "block_k -4"),
        ({"block_q": 2.0}, ValueError, "block_q 2.0"),
        ({"block_q": True}, ValueError, "block_q True"),
        ({"splits": 0, "variant": "split_kv"}, ValueError, "splits 0"),
        ({"sram_bytes": 0}, ValueError, "sram_bytes 0"),
        ({"dtype": "int8"}, ValueError, "dtype 'int8': must be one of float16"),
        ({"dtype": ["float16"]}, ValueError, "dtype"),
        ({"is_causal": "yes"}, ValueError, "is_causal 'yes': must be True or False"),
        ({"sram_bytes": 100}, SRAMCapacityError, "sram_bytes 100: the smallest tiles of q_outer"),
        ({"sram_bytes": 100, "block_q": 2, "block_k": 2}, SRAMCapacityError, "needs at least"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message) as raised:
        attention(**({"q": X, "k": X, "v": X} | arguments))
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, (ValueError, TypeError))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "fast"}, "algorithm 'fast': must be one of naive, safe, online, row"),
        ({"x": X}, r"x \(2, 4, 8\): must have two dimensions"),
        ({"block_q": 0}, "block_q 0"),
        ({"sram_bytes": 3}, "sram_bytes 3: softmax online"),
    ],
)
def test_bad_softmax_input(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_softmax(**({"x": X[0]} | arguments))


@given(problems())
def test_peak_sram_is_the_least_capacity_that_works(p: Problem) -> None:
    free = attention(p.q, p.k, p.v, **p.options)
    peak = free.peak_sram_bytes
    if peak == 0:
        return
    tight = attention(p.q, p.k, p.v, **p.options, sram_bytes=peak)
    assert tight.counts == free.counts
    np.testing.assert_array_equal(tight.out, free.out)
    if peak > 1:
        with pytest.raises(SRAMCapacityError, match=f"needs at least {peak}"):
            attention(p.q, p.k, p.v, **p.options, sram_bytes=peak - 1)


@given(problems(max_rows=12))
def test_the_machine_itself_enforces_the_capacity(p: Problem) -> None:
    """Not the closed form in front of it: the loops run, and run out, on a bounded SRAM."""
    from simattn import run as edge

    free = attention(p.q, p.k, p.v, **p.options)
    if free.peak_sram_bytes < 2:
        return
    ledgers = []

    class Bounded(edge.SRAM):
        def __init__(self, dtype, capacity_bytes, ledger):
            super().__init__(dtype, free.peak_sram_bytes - 1, ledger)
            ledgers.append(ledger)

    kept, edge.SRAM = edge.SRAM, Bounded
    try:
        with pytest.raises(SRAMCapacityError, match=r"needs .* bytes; live: .*; capacity: "):
            attention(p.q, p.k, p.v, **p.options)
    finally:
        edge.SRAM = kept
    assert ledgers[0].peak_bytes < free.peak_sram_bytes


def test_blocks_and_budgets() -> None:
    x = np.ones((200, 16), np.float32)

    def blocks(**options) -> tuple[int, int]:
        run = attention(x, x, x, **options)
        return run.block_q, run.block_k

    assert blocks() == (64, 64)
    assert blocks(block_q=500, block_k=1000) == (200, 200)  # clamped
    assert blocks(block_q=32) == (32, 200)  # no budget: all keys in one tile move the least
    assert blocks(block_k=32) == (200, 32)
    assert blocks(sram_bytes=20_000) == (80, 16)
    assert blocks(sram_bytes=20_000, block_k=48) == (32, 48)
    assert blocks(sram_bytes=20_000, block_q=8, block_k=8) == (8, 8)


def test_containers_byte_orders_and_strides() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((5, 4)) for _ in range(3))
    right = attention(q, k, v).out
    for view in (
        [x.tolist() for x in (q, k, v)],
        [x.astype(">f8") for x in (q, k, v)],
        [np.asfortranarray(x) for x in (q, k, v)],
        [np.repeat(x, 3, axis=0)[::3] for x in (q, k, v)],
    ):
        np.testing.assert_allclose(attention(*view).out, right, rtol=0, atol=1e-15)
    q.flags.writeable = False
    np.testing.assert_array_equal(attention(q, k, v).out, right)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.startswith("standard")])
def test_tiled_variants_allocate_linearly(variant: str) -> None:
    """Beside the inputs: O and a few tiles and vectors, however long; never n x n."""

    def peak(n: int) -> int:
        q, k, v = (np.ones((n, 16), np.float32) for _ in range(3))
        tracemalloc.start()
        attention(q, k, v, variant=variant, block_q=64, block_k=64)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(128)  # what is imported or cached once
    small, large = peak(1024), peak(4096)
    assert large < 5 * small  # quadratic would be 16 times
    assert large < 4096 * 4096 * 4 / 20


def test_standard_attention_does_allocate_the_square() -> None:
    x = np.ones((1024, 16), np.float32)
    tracemalloc.start()
    attention(x, x, x, variant="standard_safe")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak > 2 * 1024 * 1024 * 4


def test_threads_do_not_share_counts() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 60, 8))
    alone = {v: attention(x, x, x, variant=v, block_q=16, block_k=16) for v in VARIANTS}
    together = {}

    def work(variant: str) -> None:
        together[variant] = attention(x, x, x, variant=variant, block_q=16, block_k=16)

    threads = [threading.Thread(target=work, args=(v,)) for v in VARIANTS]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for variant, run in alone.items():
        assert together[variant].counts == run.counts
        np.testing.assert_array_equal(together[variant].out, run.out)


def test_scores_past_float16_spoil_standard_attention_alone() -> None:
    """S is stored at storage width, as the real thing does."""
    q, k = np.full((1, 4, 4), 200.0, np.float16), np.full((1, 4, 4), 200.0, np.float16)
    v = np.ones((1, 4, 4), np.float16)
    assert np.isnan(attention(q, k, v, variant="standard_safe", scale=1.0).out).all()
    assert (attention(q, k, v, variant="q_outer", scale=1.0).out == 1).all()


def test_public_names() -> None:
    for name in simattn.__all__:
        assert hasattr(simattn, name)
    assert issubclass(SRAMCapacityError, ValueError)
