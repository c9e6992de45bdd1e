"""``python -m kernels counters``: the closed form against the GPU's own counters, to the byte.

Nsight Compute counts the bytes that load and store instructions ask global memory for. It runs this
module again with ``--launch``, which launches every problem once; its counts, in launch order, are
then compared with ``simattn.predict``.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import simattn

from .check import Case, inputs
from .launch import flash_attention

READ = "smsp__sass_data_bytes_mem_global_op_ld.sum"
WRITE = "smsp__sass_data_bytes_mem_global_op_st.sum"

CASES = tuple(
    Case(variant, block_q=64, block_k=64, **problem)
    for variant in ("q_outer", "kv_outer")
    for problem in (
        {"n": 1000, "d": 64, "heads": 4, "kv_heads": 4},
        {"n": 1000, "d": 128, "heads": 4, "kv_heads": 4},
        {"n": 1000, "d": 64, "heads": 4, "kv_heads": 4, "is_causal": True},
        {"n": 700, "s": 333, "d": 80, "e": 40, "heads": 6, "kv_heads": 2, "is_causal": True},
        {"n": 500, "s": 800, "d": 33, "e": 65, "batch": 2, "window_size": (100, 20)},
        {"n": 1000, "d": 64, "heads": 4, "kv_heads": 4, "dtype": "float16"},
    )
)


def launch_all() -> None:
    """Launch every case once, with L."""
    from ._cuda import cuda

    for case in CASES:
        arrays = [cuda.to_device(x) for x in inputs(case)]
        flash_attention(
            *arrays, is_causal=case.is_causal, window_size=case.window_size, return_lse=True,
            variant=case.variant, block_q=case.block_q, block_k=case.block_k,
        )  # fmt: skip
    cuda.synchronize()


def predicted(case: Case) -> tuple[int, int]:
    """Bytes read and written."""
    traffic = simattn.predict(
        case.variant, n=case.n, n_k=case.s, d=case.d, dv=case.e, heads=case.heads,
        kv_heads=case.kv_heads, batch=case.batch, block_q=case.block_q, block_k=case.block_k,
        is_causal=case.is_causal, window_size=case.window_size, dtype=case.dtype, return_lse=True,
    ).traffic  # fmt: skip
    return traffic.total_read_bytes, traffic.total_write_bytes


def main(*, ncu: str = "ncu", json_path: Path | None = None) -> int:
    """Measure, compare, print a line per case; 1 if one differs."""
    from .bench import environment

    measured = read_csv(run_ncu(ncu))
    if len(measured) != len(CASES):
        raise RuntimeError(f"ncu: reported {len(measured)} kernels, expected {len(CASES)}")
    rows = []
    for case, counts in zip(CASES, measured, strict=True):
        model = predicted(case)
        rows.append({"case": str(case), "measured": counts, "predicted": model})
        print(
            f"{'equal' if counts == model else 'DIFFERENT'} {case}: "
            f"read {counts[0]} of {model[0]}, written {counts[1]} of {model[1]} bytes"
        )
    differ = sum(row["measured"] != row["predicted"] for row in rows)
    print(f"{len(rows) - differ} of {len(rows)} launches moved what the closed form says")
    if json_path:
        report: dict[str, Any] = {
            "command": "python -m kernels counters", **environment(),
            "metrics": [READ, WRITE], "counters": rows,
        }  # fmt: skip
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if differ else 0


def run_ncu(ncu: str) -> str:
    """Nsight Compute's CSV for ``--launch``."""
    command = [
        ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base",
        "--metrics", f"{READ},{WRITE}",
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


def read_csv(output: str) -> list[tuple[int, int]]:
    """(bytes read, bytes written) of each of our kernels, in launch order.

    >>> read_csv('==PROF== note\\n"ID","Kernel Name","%s","%s"\\n"","","byte","byte"\\n'
    ...          '"0","flash_q_outer","1,024","64"\\n' % (READ, WRITE))
    [(1024, 64)]
    """
    start = output.find('"ID"')
    if start < 0:
        raise RuntimeError(f"ncu: no table in its output: {output[-500:]}")
    return [
        (_bytes(row[READ]), _bytes(row[WRITE]))
        for row in csv.DictReader(io.StringIO(output[start:]))
        if row["ID"].isdecimal() and "flash_" in row["Kernel Name"]
    ]


def _bytes(text: str) -> int:
    return round(float(text.replace(",", "")))
