"""``python -m kernels counters``: the closed form against the GPU's own counters, to the byte.

Nsight Compute counts the bytes that load and store instructions ask global memory for, and the
32-byte sectors that L2 sends to the SMs, which is how the tensor-core kernels' copies show. It runs
this module again with ``--launch``, which launches every problem once; its counts, in launch order,
are then compared with ``simattn.predict``.

`flash_sm90` copies whole boxes: what a box has past the tensor's last row is counted by the chip,
so its closed form is that of rows rounded up to whole tiles. And it reads its table of work.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import simattn

from .check import Case, inputs
from .launch import Prepared, prepare
from .layout import round_up
from .problem import VARIANTS, Problem
from .sm90_layout import GROUP_ROWS, layout_for
from .sm90_schedule import END, work

READ = "smsp__sass_data_bytes_mem_global_op_ld.sum"
SECTORS, SECTOR_BYTES = "l1tex__m_xbar2l1tex_read_sectors.sum", 32
WRITE = "smsp__sass_data_bytes_mem_global_op_st.sum"
COPIED_OUT = "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_st.sum"  # by tensor copies
METRICS = (READ, SECTORS, WRITE, COPIED_OUT)

PORTABLE = tuple(
    Case(variant, block_q=64, block_k=64, **problem)
    for variant in VARIANTS
    for problem in (
        {"n": 1000, "d": 64, "heads": 4, "kv_heads": 4},
        {"n": 1000, "d": 128, "heads": 4, "kv_heads": 4},
        {"n": 1000, "d": 64, "heads": 4, "kv_heads": 4, "is_causal": True},
        {"n": 700, "s": 333, "d": 80, "e": 40, "heads": 6, "kv_heads": 2, "is_causal": True},
        {"n": 500, "s": 800, "d": 33, "e": 65, "batch": 2, "window_size": (100, 20)},
        {"n": 1000, "d": 64, "heads": 4, "kv_heads": 4, "dtype": "float16"},
    )
)
CORES = tuple(  # rows of whole sectors
    Case("mma", dtype="float16", **problem)
    for problem in (
        {"n": 1000, "d": 64, "heads": 4, "kv_heads": 4},
        {"n": 1000, "d": 128, "heads": 4, "kv_heads": 4},
        {"n": 1000, "d": 64, "heads": 4, "kv_heads": 4, "is_causal": True},
        {"n": 700, "s": 333, "d": 80, "e": 48, "heads": 6, "kv_heads": 2, "is_causal": True},
        {"n": 500, "s": 800, "d": 128, "e": 64, "batch": 2, "window_size": (100, 20)},
        {"n": 2048, "d": 128, "heads": 4, "kv_heads": 4},
    )
)
CORES += tuple(
    Case("sm90", dtype="float16", **problem)
    for problem in (
        {"n": 1000, "d": 64, "heads": 4, "kv_heads": 4},
        {"n": 1000, "s": 700, "d": 128, "heads": 4, "kv_heads": 2},
        {"n": 2048, "d": 128, "heads": 4, "kv_heads": 4},
        {"n": 3072, "d": 64, "heads": 4, "kv_heads": 4, "is_causal": True},
        {"n": 2048, "d": 128, "heads": 4, "kv_heads": 4, "is_causal": True},
        {"n": 1024, "d": 128, "e": 64, "heads": 2, "batch": 2, "window_size": (200, 20)},
    )
)
CASES = PORTABLE + CORES


def launch_all() -> None:
    """Launch every case once, with L."""
    for case in CASES:
        prepared(case).launch()
    from ._cuda import cuda

    cuda.synchronize()


def prepared(case: Case) -> Prepared:
    """The launch of a case, with L."""
    from ._cuda import cuda

    arrays = [cuda.to_device(x) for x in inputs(case)]
    return prepare(
        *arrays, is_causal=case.is_causal, window_size=case.window_size, return_lse=True,
        variant=case.variant, block_q=case.block_q, block_k=case.block_k,
    )  # fmt: skip


def tiles_of(case: Case) -> tuple[int, int]:
    """Rows of its tiles: a tensor-core kernel has its own for each width."""
    if case.block_q and case.block_k:
        return case.block_q, case.block_k
    layout = prepared(case).layout
    return layout.block_q, layout.block_k


def predicted(case: Case, block_q: int, block_k: int, sms: int = 132) -> tuple[int, int]:
    """Bytes read and written, in tiles of these rows. The tensor-core kernels are ``q_outer``."""
    variant = case.variant if case.variant in VARIANTS else "q_outer"
    problem: dict[str, Any] = {
        "d": case.d, "dv": case.e, "heads": case.heads, "kv_heads": case.kv_heads,
        "batch": case.batch, "is_causal": case.is_causal, "window_size": case.window_size,
        "dtype": case.dtype, "return_lse": True,
    }  # fmt: skip
    n, s = case.n, case.s or case.n
    tiles = {"block_q": min(block_q, n), "block_k": min(block_k, s)}
    traffic = simattn.predict(variant, n=n, n_k=s, **tiles, **problem).traffic
    read, written = traffic.total_read_bytes, traffic.total_write_bytes
    if case.variant == "sm90":
        boxes = simattn.predict(
            variant, n=round_up(n, block_q), n_k=round_up(s, block_k), block_q=block_q,
            block_k=block_k, **problem,
        )  # fmt: skip
        read = boxes.traffic.total_read_bytes + table_bytes(case, block_q, block_k, sms)
    return read, written


def table_bytes(case: Case, block_q: int, block_k: int, sms: int) -> int:
    """Sectors of the table of work that the blocks read: each its row, up to the end's mark."""
    d, e, n, s = case.d, case.e or case.d, case.n, case.s or case.n
    lead = (case.batch, case.heads)
    problem = Problem.of(
        (*lead, n, d), (*lead, s, d), (*lead, s, e), case.dtype,
        is_causal=case.is_causal, window_size=case.window_size,
    )  # fmt: skip
    usual = layout_for(d, e, n=n, s=s)
    table = work(problem, replace(usual, groups=block_q // GROUP_ROWS, block_k=block_k), sms)
    begins = np.arange(len(table)) * table.shape[1] * table.itemsize
    ends = begins + ((table != END).sum(axis=1) + 1) * table.itemsize
    sectors = -(-ends // SECTOR_BYTES) - begins // SECTOR_BYTES
    return SECTOR_BYTES * int(sectors.sum())


def main(*, ncu: str = "ncu", json_path: Path | None = None) -> int:
    """Measure, compare, print a line per case; 1 if one differs."""
    from .bench import environment

    measured = read_csv(run_ncu(ncu))
    if len(measured) != len(CASES):
        raise RuntimeError(f"ncu: reported {len(measured)} kernels, expected {len(CASES)}")
    rows = []
    for case, counted in zip(CASES, measured, strict=True):
        block_q, block_k = tiles_of(case)
        model = predicted(case, block_q, block_k)
        portable = case.variant in VARIANTS
        read = counted[READ] if portable else SECTOR_BYTES * counted[SECTORS]
        counts = read, counted[WRITE] + counted[COPIED_OUT]
        rows.append(
            {
                "case": str(case),
                "block_q": block_q,
                "block_k": block_k,
                "measured": counts,
                "predicted": model,
            }
        )
        print(
            f"{'equal' if counts == model else 'DIFFERENT'} {case}: "
            f"read {counts[0]} of {model[0]}, written {counts[1]} of {model[1]} bytes"
        )
    differ = sum(row["measured"] != row["predicted"] for row in rows)
    print(f"{len(rows) - differ} of {len(rows)} launches moved what the closed form says")
    if json_path:
        report: dict[str, Any] = {
            "command": "python -m kernels counters", **environment(),
            "metrics": METRICS, "counters": rows,
        }  # fmt: skip
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if differ else 0


def run_ncu(ncu: str) -> str:
    """Nsight Compute's CSV for ``--launch``."""
    command = [
        ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base",
        "--metrics", ",".join(METRICS),
        sys.executable, "-m", "kernels", "counters", "--launch",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    except FileNotFoundError:
        raise RuntimeError(f"--ncu: {ncu!r} was not found; Nsight Compute is needed") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError("ncu: took longer than 400 s") from None
    if done.returncode:
        raise RuntimeError(
            f"ncu: exit status {done.returncode}: {(done.stderr or done.stdout)[-500:]}"
        )
    return done.stdout


def read_csv(output: str) -> list[dict[str, int]]:
    """The metrics of each of our kernels, in launch order.

    >>> (counts,) = read_csv(
    ...     '==PROF== note\\n"ID","Kernel Name","%s","%s","%s","%s"\\n"","","byte","","",""\\n'
    ...     '"0","flash_q_outer","1,024","40","64","0"\\n' % METRICS)
    >>> list(counts.values())
    [1024, 40, 64, 0]
    """
    start = output.find('"ID"')
    if start < 0:
        raise RuntimeError(f"ncu: no table in its output: {output[-500:]}")
    return [
        {name: round(float(row[name].replace(",", ""))) for name in METRICS}
        for row in csv.DictReader(io.StringIO(output[start:]))
        if row["ID"].isdecimal() and "flash_" in row["Kernel Name"]
    ]
