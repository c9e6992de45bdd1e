"""Published figures, recomputed: each printed value beside ours, and how ours came about.

``how`` begins with ``counted`` (a run on the simulated memories, times the heads and batch where it
was one head), ``closed form`` (equal to counted runs, and tested to be, but at this size not run)
or ``computed`` (arithmetic on the stated inputs). Where a figure does not reproduce, ``how`` says
so and no formula is bent to hit it. GB is 1e9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from simattn import exact, tiling
from simattn.backward import Gradients, attention_backward
from simattn.device import DEVICES
from simattn.dtypes import Array
from simattn.iomodel import predict
from simattn.iomodel_square import predict_square
from simattn.rescales import count_rescales
from simattn.run import attention, row_softmax
from simattn.square_tiles import largest_block
from simattn.topk import softmax_topk
from simattn.trace import record

Row = dict[str, Any]


def row(id: str, source: str, printed: float, ours: float, unit: str, how: str) -> Row:
    return {
        "id": id, "source": source, "printed": printed, "ours": ours, "ratio": ours / printed,
        "unit": unit, "how": how,
    }  # fmt: skip


FA1, FA2, FA3 = "arXiv 2205.14135", "arXiv 2307.08691", "arXiv 2407.08608"
N, D, PROGRAMS = 1024, 64, 16 * 64  # FlashAttention's Figure 2: GPT-2 medium, batch 64


def one_head(variant: str, block_q: int, block_k: int) -> Gradients:
    """Forward and backward of one head of FlashAttention's Figure 2, counted."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((N, D)) for _ in range(4))
    return attention_backward(
        q, k, v, dout, variant=variant, block_q=block_q, block_k=block_k, dtype="float16"
    )


def gigabytes(elems: int) -> float:
    """Of all heads, with every element taking 2 bytes, m and l too, as in the paper."""
    return elems * 2 * PROGRAMS / 1e9


def figure_2_left() -> list[Row]:
    source = f"{FA1}, Figure 2 left"
    a100 = DEVICES["a100"]
    standard = one_head("standard_backward", N, N)
    flash = one_head("kv_outer_backward", 64, 384)
    moved = {
        name: gigabytes(g.forward.traffic.total_elems + g.counts.traffic.total_elems)
        for name, g in (("standard", standard), ("flash", flash))
    }
    flops = {
        name: (g.forward.flops.matmul + g.counts.flops.matmul) * PROGRAMS
        for name, g in (("standard", standard), ("flash", flash))
    }
    passes = gigabytes(19 * N * N + 12 * N * D)
    heads = f"one head, times {PROGRAMS}"
    no = "does not reproduce"
    # S, P, dP and dS of all heads are far larger than L2; the rest of DRAM's traffic is 12 Nd.
    standard_s = moved["standard"] * 1e9 / a100.dram_bytes_per_s
    flash_s = max(
        gigabytes(12 * N * D) * 1e9 / a100.dram_bytes_per_s,
        moved["flash"] * 1e9 / a100.l2_bytes_per_s,
        flops["flash"] / a100.matmul_flops_per_s["float16"],
        (flash.forward.flops.exp + flash.counts.flops.exp) * PROGRAMS / a100.exp_per_s,
    )
    return [
        row("fa1.fig2-left.standard.traffic", source, 40.3, moved["standard"], "GB",
            f"counted: Algorithms 0 and 3, {heads}; {no}: the printed figure has separate mask and "
            "dropout passes, see the next row"),
        row("fa1.fig2-left.standard.traffic-with-mask-and-dropout", source, 40.3, passes, "GB",
            "closed form: 19N^2 + 12Nd, the same with separate mask and dropout passes"),
        row("fa1.fig2-left.flash.traffic", source, 4.4, moved["flash"], "GB",
            f"counted: Algorithms 1 and 4, Br 64, Bc 384 (M = 192 KB of fp16), {heads}"),
        row("fa1.fig2-left.standard.flops", source, 66.6, flops["standard"] / 1e9, "GFLOP",
            f"counted: matmul FLOPs, {heads}; {no}: the stated workload takes 12 times as many"),
        row("fa1.fig2-left.flash.flops", source, 75.2, flops["flash"] / 1e9, "GFLOP",
            f"counted: matmul FLOPs, {heads}; {no}: the stated workload takes 13 times as many"),
        row("fa1.fig2-left.standard.time", source, 41.7, 1e3 * standard_s, "ms",
            "closed form: DRAM of an A100 at its peak; does not reproduce: a floor, not a time"),
        row("fa1.fig2-left.flash.time", source, 7.3, 1e3 * flash_s, "ms",
            "closed form: matmul peak of an A100; does not reproduce: a floor, not a time"),
    ]  # fmt: skip


def figure_2_left_by_tile() -> list[Row]:
    derived = {64: 18.73, 128: 10.04, 256: 5.69, 384: 4.61, 512: 3.52, 1024: 2.43}
    rows = []
    for Bc, value in derived.items():
        g = one_head("kv_outer_backward", 64, Bc)
        total = gigabytes(g.forward.traffic.total_elems + g.counts.traffic.total_elems)
        rows.append(
            row(f"fa1.fig2-left.flash.traffic.bc{Bc}",
                f"{FA1}, lines of Algorithms 1 and 4 (reckoned by hand, not printed)", value, total,
                "GB", f"counted: forward and backward, Br 64, one head, times {PROGRAMS}")
        )  # fmt: skip
    return rows


def figure_2_middle() -> list[Row]:
    derived = {64: 6.98, 128: 3.70, 256: 2.05, 512: 1.23}
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((N, D)) for _ in range(3))
    rows = []
    for Bc, value in derived.items():
        run = attention(q, k, v, variant="kv_outer", block_q=64, block_k=Bc, dtype="float16")
        rows.append(
            row(f"fa1.fig2-middle.forward.bc{Bc}",
                f"{FA1}, Figure 2 middle (drawn without numbers; lines of Algorithm 1)", value,
                gigabytes(run.traffic.total_elems), "GB",
                f"counted: forward, Br 64, one head, times {PROGRAMS}")
        )  # fmt: skip
    return rows


def table_21() -> list[Row]:
    heads, mb = 16 * 8, 2**20
    pytorch = (36, 104, 336, 1184, 4416, 17024)
    flash = (22, 44, 104, 209, 418, 836, 1672, 3344, 6688, 13376)
    rows = []
    for name, printed in (("pytorch", pytorch), ("flash", flash)):
        for i, value in enumerate(printed):
            n = 128 << i
            if name == "pytorch":
                elems, wide, what = 4 * n * n + 10 * n * D, 0, "(4N^2 + 10Nd) x 2 bytes"
            elif n <= 256:
                elems, wide, what = 11 * n * D, 0, "11Nd x 2 bytes"
            else:
                elems, wide, what = 13 * n * D, 2 * n, "13Nd x 2 bytes + 2N x 4"
            total = (2 * elems + 4 * wide) * heads / mb
            rows.append(
                row(f"fa1.table21.{name}.n{n}", f"{FA1}, Table 21", value, total, "MB (2^20)",
                    f"closed form: what lies in memory, {what} a head, {heads} heads")
            )  # fmt: skip
    return rows


def softmax_accesses() -> list[Row]:
    x = np.random.default_rng(0).standard_normal((16, 2048)).astype(np.float32)
    source = "arXiv 1805.02867, section"
    rows = []
    for name, printed in (("naive", 3), ("safe", 4), ("online", 3)):
        run = row_softmax(x, algorithm=name, block_k=64)
        rows.append(
            row(f"softmax.{name}", f"{source} 2 and 3", printed, run.traffic.total_elems / x.size,
                "accesses an element", "counted: 16 x 2048")
        )  # fmt: skip
    for name, printed in (("safe", 5), ("online", 4), ("fused", 1)):
        _, counts = softmax_topk(x, 5, algorithm=name)
        moved = counts.traffic.total_elems - counts.traffic.writes["T"]
        rows.append(
            row(f"softmax.{name}.top-k", f"{source} 4", printed, moved / x.size,
                "accesses an element", "counted: 16 x 2048, top 5, whose own writes are left out")
        )  # fmt: skip
    return rows


def flash_attention_2() -> list[Row]:
    n, Br = 1024, 64
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, D)).astype(np.float32) for _ in range(3))
    run = attention(q, k, v, variant="q_outer", block_q=Br, block_k=64, return_lse=True)
    rows = [
        row("fa2.forward.traffic", f"{FA2}, Algorithm 1: 2Nd + N + 2Nd Tr", 2 * n * D + n
            + 2 * n * D * (n // Br), run.traffic.total_elems, "elements",
            f"counted: N {n}, d {D}, Br {Br}, with L")
    ]  # fmt: skip
    q, k, v = q[:256], k[:256], v[:256]
    for variant, printed, what in (("q_outer", 1, "once a row"), ("q_outer_each", 4, "every step")):
        events = record(variant, q, k, v, block_q=64, block_k=64).events
        divided = sum(
            e.at[1][0][1] - e.at[1][0][0] for e in events if e.text == "O / l" and e.at
        )  # rows
        rows.append(
            row(f"fa2.divisions.{variant}", f"{FA2}, section 3.1: O divided {what}", printed,
                divided / 256, "divisions a row", "counted: N 256, 4 key tiles")
        )  # fmt: skip
    return rows


def with_outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), FlashAttention-3's test of accuracy."""
    rare = rng.random(shape) < 0.001
    return rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * rare


def flash_attention_3() -> list[Row]:
    n, d = 1024, 64
    rng = np.random.default_rng(0)
    q, k, v = (with_outliers(rng, (n, d)).astype(np.float16) for _ in range(3))
    want, _ = exact.attention(q, k, v)
    rmse = {}
    for variant in ("standard_row", "q_outer"):
        out = attention(q, k, v, variant=variant, block_q=128, block_k=128).out
        rmse[variant] = math.sqrt(float(((out.astype(np.float64) - want) ** 2).mean()))
    ratio = rmse["standard_row"] / rmse["q_outer"]
    how = (
        f"computed: our float16 run, {n} x {d}, seed 0; does not reproduce: the paper prints no "
        "shape"
    )
    source = f"{FA3}, Table 3"
    return [
        row("fa3.rmse.standard", source, 3.2e-4, rmse["standard_row"], "RMSE", how),
        row("fa3.rmse.flash", source, 1.9e-4, rmse["q_outer"], "RMSE", how),
        row("fa3.rmse.ratio", source, 1.7, ratio, "standard / flash", how),
    ]


def flash_attention_4(given: dict[str, Array] | None = None) -> list[Row]:
    source = "FlashAttention-4: about 90 % of rescales vanish"
    rng = np.random.default_rng(0)
    cases = [("outliers", [with_outliers(rng, (2048, 64)) for _ in range(3)], 128)]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2048, 64)) for _ in range(3))
    cases.append(("normal-doubled", [2 * q, 2 * k, v], 128))
    totals = {}
    for name, (q, k, v), Bc in cases:
        r = count_rescales(q[:512], k, v, block_k=Bc)
        totals[name] = (r.visits, r.rises, r.kept, f"2048 keys, d 64, key tiles of {Bc}, seed 0")
    if given is not None:
        heads = [x.reshape(-1, *x.shape[-2:]).astype(np.float64) for x in given.values()]
        counted = [count_rescales(*head, block_k=64) for head in zip(*heads, strict=True)]
        sums = [sum(getattr(r, key) for r in counted) for key in ("visits", "rises", "kept")]
        totals["input"] = (*sums, "the given file, key tiles of 64")
    rows = []
    for name, (visits, rises, kept, what) in totals.items():
        rows.append(
            row(f"fa4.rescales.{name}.of-rises", source, 90, 100 * (1 - kept / max(rises, 1)),
                "% of rescales by less than 1",
                f"counted: {kept} of {rises} are left; {what}; threshold 8 octaves")
        )  # fmt: skip
        rows.append(
            row(f"fa4.rescales.{name}.of-all", source, 90, 100 * (1 - kept / max(visits, 1)),
                "% of unconditional rescales",
                f"counted: {kept} of {visits} are left; {what}; threshold 8 octaves")
        )  # fmt: skip
    return rows


# Saha & Ye: M in elements, so float32 throughout, 4 bytes an element of storage and scratch alike

SAHA_N, SAHA_D = 65536, 256


def rows_traffic(M: int, n: int = SAHA_N, d: int = SAHA_D) -> int | None:
    """Elements that whole-row tiles, FlashAttention-2's, move with M elements of SRAM."""
    tiles = tiling.best("q_outer", 4 * M, n=n, d=d, block_k=1, granule=1)
    return tiles.counts.traffic.total_elems if tiles else None


def square_traffic(M: int, n: int = SAHA_N, d: int = SAHA_D) -> int:
    """Elements that square tiles of the width too move with M elements of SRAM."""
    return predict_square(n=n, d=d, block=largest_block(M)).traffic.total_elems


def slope(sizes: Sequence[int], traffic: Callable[[int], int | None]) -> float:
    """The exponent p of traffic ~ M^p, by least squares."""
    moved = [traffic(M) for M in sizes]
    return float(np.polyfit(np.log(sizes), np.log(np.array(moved, dtype=np.float64)), 1)[0])


def geometric(first: int, last: int, count: int) -> list[int]:
    """Whole numbers, evenly spaced in the logarithm, both ends included.

    >>> geometric(1, 64, 4)
    [1, 4, 16, 64]
    """
    ratio = (last / first) ** (1 / (count - 1))
    return [round(first * ratio**i) for i in range(count)]


def saha_ye() -> list[Row]:
    source = "arXiv 2402.07443"
    square = SAHA_D * SAHA_D
    above = slope(geometric(square, 16 * square, 17), rows_traffic)
    below = slope(geometric(square // 256, square, 17), square_traffic)
    crossing = next(
        M for M in geometric(square // 64, square, 200)
        if (rows_traffic(M) or math.inf) < square_traffic(M)
    )  # fmt: skip
    how = f"closed form: N {SAHA_N}, d {SAHA_D}"
    return [
        row("saha-ye.slope.above", f"{source}: N^2 d^2 / M for M >= d^2", -1.0, above,
            "exponent of M", f"{how}, q_outer's best tiles, fitted over M = d^2 .. 16 d^2"),
        row("saha-ye.slope.below", f"{source}: N^2 d / sqrt(M) for M < d^2", -0.5, below,
            "exponent of M", f"{how}, square tiles of the width too, fitted over M = d^2 / 256 .. "
            "d^2; its N^2 of S make it flatter near d^2"),
        row("saha-ye.crossing", f"{source}: the two meet at d^2, up to a constant", 1.0,
            crossing / square, "d^2", f"{how}, the M from which whole rows move less"),
    ]  # fmt: skip


def sectors(n: int, block: int, *, is_causal: bool = False) -> float:
    """32-byte sectors that q_outer reads and writes, fp16, d 64."""
    counts = predict(
        "q_outer", n=n, d=64, block_q=block, block_k=block, dtype="float16", is_causal=is_causal
    )
    return counts.traffic.total_bytes / 32


def sawtooth() -> list[Row]:
    source, unit = "arXiv 2601.16032", "32-byte sectors"
    S, T = 32768, 80
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2048, 64)) for _ in range(3))
    run = partial(attention, q, k, v, block_q=64, block_k=64, dtype="float16")
    measured = "hardware counter"
    small, tile = 2048, 64
    return [
        row("sawtooth.l2.measured", f"{source}, {measured}, S {S}", 107_729_467, sectors(S, T),
            unit, f"closed form: 8S(1 + ceil(S/T)), T {T} inferred, reads and writes without L"),
        row("sawtooth.l2.formula", f"{source}: 8S(1 + S/T), S {small}, T {tile}",
            8 * small * (1 + small / tile), run().traffic.total_bytes / 32, unit,
            "counted: d 64, fp16"),
        row("sawtooth.l2.causal", f"{source}: 8S(S/2T + 1/2), S {small}, T {tile}",
            8 * small * (small / (2 * tile) + 0.5),
            run(is_causal=True).traffic.total_bytes / 32, unit,
            "counted: d 64, fp16, 8S(S/2T + 3/2); does not reproduce: the printed form counts K "
            "and V only"),
    ]  # fmt: skip


def ring_attention() -> list[Row]:
    source = "arXiv 2310.01889, Table 2"
    flops = DEVICES["a100"].matmul_flops_per_s["float16"]
    return [
        row(f"ring.block.{name}", f"{source}, A100 {title}", printed, flops / rate / 1e3,
            "1e3 tokens", f"computed: {flops / 1e12:g} TFLOP/s over {rate / 1e9:g} GB/s")
        for name, title, printed, rate in (
            ("nvlink", "NVLink", 1.0, 300e9), ("infiniband", "InfiniBand", 24.5, 12.5e9),
        )
    ]  # fmt: skip


ITEMS: dict[str, Callable[[], list[Row]]] = {
    "fa1.fig2-left": figure_2_left,
    "fa1.fig2-left-by-tile": figure_2_left_by_tile,
    "fa1.fig2-middle": figure_2_middle,
    "fa1.table21": table_21,
    "softmax": softmax_accesses,
    "fa2": flash_attention_2,
    "fa3": flash_attention_3,
    "fa4": flash_attention_4,
    "saha-ye": saha_ye,
    "sawtooth": sawtooth,
    "ring": ring_attention,
}


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each figure that does not reproduce, with the reason."""
    lines = []
    for r in rows:
        _, found, reason = r["how"].partition("does not reproduce: ")
        if found:
            lines.append(f"{r['id']}: {reason}")
    return lines
