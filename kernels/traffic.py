"""Three counts of one launch: the kernel's own source, ``simattn``'s run, and the closed form.

They share no code: the kernel counts by running on arrays that count, or under the emulator, the
run by moving tiles between a simulated HBM and SRAM, the form by arithmetic alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

import simattn
from simattn.counts import Traffic

from . import emulated
from .counting import simulate
from .emulator import Report
from .problem import VARIANTS, Problem, check_variant, numpy_dtype, shown

MAX_WORK = 1 << 22  # multiply-adds; the simulator does about a hundred thousand a second
MAX_WORK_EMULATED = 1 << 26  # the emulator does some million
MAX_VISITS = 1 << 13  # pairs of a row tile and a key tile; the simulator does a hundred a second
MAX_VISITS_EMULATED = 1 << 10  # the emulator ten
SMALL = 8  # the portable kernels' default tiles


@dataclass(frozen=True, slots=True)
class Comparison:
    """The traffic of one problem from three sources; totals over batch and query heads."""

    problem: dict[str, object]
    kernel: Traffic
    run: Traffic
    predicted: Traffic
    sectors: dict[str, dict[str, int]] | None = None  # of 32 bytes, as the emulator counts them

    @property
    def equal(self) -> bool:
        return self.kernel == self.run == self.predicted


def compare(
    *,
    variant: str,
    n: int,
    d: int,
    block_q: int | None = None,
    block_k: int | None = None,
    n_k: int | None = None,
    dv: int | None = None,
    heads: int = 1,
    kv_heads: int | None = None,
    batch: int = 1,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dtype: str = "float32",
    return_lse: bool = False,
    seed: int = 0,
) -> Comparison:
    """Count one problem three times, on random input.

    The portable kernels count under Numba's simulator, those for tensor cores, ``mma`` and
    ``sm90``, under the emulator, by default in the tiles that a GPU would be given.

    >>> import os, pytest
    >>> if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1": pytest.skip("needs the simulator")
    >>> c = compare(variant="q_outer", n=5, d=4, block_q=2, block_k=2)
    >>> c.equal, c.kernel.reads["K"]  # 3 row tiles, each reads K [5, 4]
    (True, 60)
    """
    check_variant(variant)
    sizes = {"n": n, "d": d, "heads": heads, "batch": batch, "n_k": n_k, "dv": dv,
             "kv_heads": kv_heads, "block_q": block_q, "block_k": block_k}  # fmt: skip
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}: {shown(size)} must be at least 1")
    n_k, dv, kv_heads = n_k or n, dv or d, kv_heads or heads
    q_shape, k_shape, v_shape = (
        (batch, heads, n, d), (batch, kv_heads, n_k, d), (batch, kv_heads, n_k, dv),
    )  # fmt: skip
    asked = Problem.of(
        q_shape, k_shape, v_shape, dtype, is_causal=is_causal, window_size=window_size
    )
    work = batch * heads * n * n_k * (d + dv)
    most = MAX_WORK if variant in VARIANTS else MAX_WORK_EMULATED
    if work > most:
        raise ValueError(
            f"n: {shown(work)} multiply-adds are too many to simulate, at most {most}; "
            "python -m simattn counts and predicts larger problems"
        )
    layout = None
    if variant in VARIANTS:
        block_q, block_k = block_q or SMALL, block_k or SMALL
    else:
        layout = emulated.layout_with(variant, asked, block_q=block_q, block_k=block_k)
        block_q, block_k = layout.block_q, layout.block_k
    tiles = {"block_q": min(block_q, n), "block_k": min(block_k, n_k)}
    visits = batch * heads * -(-n // tiles["block_q"]) * -(-n_k // tiles["block_k"])
    most = MAX_VISITS if layout is None else MAX_VISITS_EMULATED
    if visits > most:
        raise ValueError(
            f"block_q, block_k: {shown(visits)} pairs of tiles are too many to simulate, at most "
            f"{most}; python -m simattn counts and predicts larger problems"
        )
    kind = numpy_dtype("dtype", dtype)
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape).astype(kind) for shape in (q_shape, k_shape, v_shape))
    mask = {"is_causal": is_causal, "window_size": window_size, "return_lse": return_lse}
    sectors = None
    order = variant if variant in VARIANTS else "q_outer"
    if layout is None:
        kernel = simulate(q, k, v, variant=variant, **tiles, **mask).traffic
    else:
        done = emulated.attention(q, k, v, layout=layout, **mask)
        kernel, sectors = done.traffic, _sectors(done.report.check())
    return Comparison(
        problem={
            "variant": variant, "n": n, "n_k": n_k, "d": d, "dv": dv, "heads": heads,
            "kv_heads": kv_heads, "batch": batch, "dtype": dtype, **tiles, **mask,
        },
        kernel=kernel,
        run=simattn.attention(q, k, v, variant=order, **tiles, **mask).traffic,
        predicted=simattn.predict(
            order, n=n, n_k=n_k, d=d, dv=dv, heads=heads, kv_heads=kv_heads, batch=batch,
            dtype=dtype, **tiles, **mask,
        ).traffic,
        sectors=sectors,
    )  # fmt: skip


def _sectors(report: Report) -> dict[str, dict[str, int]]:
    counts = report.tensors.items()
    return {
        "reads": {name: x.read_sectors for name, x in counts if x.read_sectors},
        "writes": {name: x.write_sectors for name, x in counts if x.write_sectors},
    }


def to_json(comparison: Comparison) -> str:
    """The problem, each source's elements per tensor and in total, and whether all are equal.

    Of a kernel for tensor cores also the 32-byte sectors that it asks for, per tensor: of sm90's
    loads those of whole boxes.
    """
    sources = {
        name: {
            "reads": dict(traffic.reads),
            "writes": dict(traffic.writes),
            "read_elems": traffic.total_read_elems,
            "write_elems": traffic.total_write_elems,
            "read_bytes": traffic.total_read_bytes,
            "write_bytes": traffic.total_write_bytes,
        }
        for name, traffic in _sources(comparison).items()
    }
    sectors = {} if comparison.sectors is None else {"sectors": comparison.sectors}
    outcome = {**comparison.problem, **sources, **sectors, "equal": comparison.equal}
    return json.dumps(outcome, indent=2)


def to_text(comparison: Comparison) -> str:
    """A line per tensor and direction, a column per source, in elements; totals in bytes too."""
    sources = _sources(comparison)
    lines = [" ".join(f"{key}={value}" for key, value in comparison.problem.items())]
    lines.append(f"{'elements':<18}" + "".join(f"{name:>14}" for name in sources))
    for direction in ("reads", "writes"):
        for tensor in ("Q", "K", "V", "O", "m", "l", "L"):
            moved = [getattr(traffic, direction).get(tensor, 0) for traffic in sources.values()]
            if any(moved):
                lines.append(_line(f"{tensor} {direction}", moved))
    for total in ("read_elems", "write_elems", "read_bytes", "write_bytes"):
        totals = [getattr(traffic, f"total_{total}") for traffic in sources.values()]
        lines.append(_line(f"total {total}", totals))
    return "\n".join([*lines, "equal" if comparison.equal else "DIFFERENT"])


def _sources(comparison: Comparison) -> dict[str, Traffic]:
    return {
        "kernel": comparison.kernel,
        "simattn": comparison.run,
        "closed_form": comparison.predicted,
    }


def _line(label: str, counts: list[int]) -> str:
    return f"{label:<18}" + "".join(f"{count:>14}" for count in counts)
