"""``python -m kernels bench``: how long both loop orders take on this machine's GPU.

16,384 tokens and 2,048 hidden columns whatever the sequence length and width, float32. Times are
medians from device events; torch's float32 backends run on the same tensors if torch is installed.
Beside the ratio of the loop orders' times stands the ratio of the traffic that the model predicts.
"""

from __future__ import annotations

import faulthandler
import json
import statistics
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import simattn

from .launch import flash_attention
from .plans import tiles

TOKENS, HIDDEN = 16384, 2048
HANGS_AFTER_S = 120
GROUP_SECONDS, GROUPS = 0.05, 5  # a group of launches runs at least so long


def main(
    *, widths: tuple[int, ...], rows: tuple[int, ...], is_causal: bool, json_path: Path | None
) -> int:
    """Time every width and length; print a table, and write the rows if asked to."""
    from .results import bench_table

    report = {"command": _command(widths, rows, is_causal), **environment(), "rows": []}
    for d in widths:
        for n in rows:
            faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
            report["rows"].append(measure(n, d, is_causal))
            if json_path:
                json_path.write_text(json.dumps(report, indent=1) + "\n")
    faulthandler.cancel_dump_traceback_later()
    print(bench_table(report))
    return 0


def measure(n: int, d: int, is_causal: bool = False) -> dict[str, Any]:
    """One row: seconds of each loop order and of torch's backends, and the predicted traffic."""
    from .compiled import Kernel, load

    batch, heads = max(1, TOKENS // n), max(1, HIDDEN // d)
    make = _torch_inputs if _torch() else _numba_inputs
    q, k, v, out = make((batch, heads, n, d))
    pairs = n * (n + 1) / 2 if is_causal else n * n
    row: dict[str, Any] = {
        "n": n, "d": d, "batch": batch, "heads": heads, "is_causal": is_causal,
        "flops": 4 * batch * heads * pairs * d,
    }  # fmt: skip
    for variant in ("q_outer", "kv_outer"):
        layout = tiles(0, variant, d, d, None, None)
        loaded = load(Kernel(variant, layout, "float32"), 0).loaded
        predicted = simattn.predict(
            variant, n=n, d=d, heads=heads, batch=batch, is_causal=is_causal,
            block_q=min(n, layout.block_q), block_k=min(n, layout.block_k),
        ).traffic  # fmt: skip
        options = {"variant": variant, "is_causal": is_causal, "out": out}
        row[variant] = {
            "seconds": seconds(lambda o=options: flash_attention(q, k, v, **o)),
            "block_q": layout.block_q,
            "block_k": layout.block_k,
            "registers": loaded.registers,
            "local_bytes": loaded.local_bytes,
            "shared_bytes": loaded.shared_bytes,
            "predicted_bytes": predicted.total_bytes,
        }
    row["torch"] = _torch_seconds(q, k, v, is_causal) if _torch() else {}
    return row


def seconds(launch: Callable[[], object]) -> float:
    """Median time of a launch, between device events on the current stream."""
    from ._cuda import cuda

    stream = _current_stream()

    def group(launches: int) -> float:
        start, end = cuda.event(), cuda.event()
        start.record(stream)
        for _ in range(launches):
            launch()
        end.record(stream)
        end.synchronize()
        return cuda.event_elapsed_time(start, end) / 1000 / launches

    group(1)
    launches = max(1, min(200, round(GROUP_SECONDS / max(group(1), 1e-6))))
    group(launches)
    return statistics.median(group(launches) for _ in range(GROUPS))


def environment() -> dict[str, str]:
    """The card, the driver, and the versions of what ran."""
    import numba
    import numba_cuda

    from . import driver
    from ._cuda import cuda

    name = cuda.get_current_device().name
    versions = {
        "card": name.decode() if isinstance(name, bytes) else name,
        "driver": _driver(),
        "cuda": driver.version(),
        "numba": numba.__version__,
        "numba_cuda": numba_cuda.__version__,
        "numpy": np.__version__,
    }
    return versions | ({"torch": _torch().__version__} if _torch() else {})


def _driver() -> str:
    """The display driver's version, as its own tool says it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _command(widths: tuple[int, ...], rows: tuple[int, ...], is_causal: bool) -> str:
    d, n = (",".join(map(str, numbers)) for numbers in (widths, rows))
    return f"python -m kernels bench --d {d} --n {n}" + (" --causal" if is_causal else "")


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _current_stream() -> Any:
    from ._cuda import cuda

    torch = _torch()
    handle = torch.cuda.current_stream().cuda_stream if torch else 0
    return cuda.external_stream(handle) if handle else 0


def _torch_inputs(shape: tuple[int, ...]) -> list[Any]:
    torch = _torch()
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda") for _ in range(4)]


def _numba_inputs(shape: tuple[int, ...]) -> list[Any]:
    from ._cuda import cuda

    rng = np.random.default_rng(0)
    return [cuda.to_device(rng.standard_normal(shape, dtype=np.float32)) for _ in range(4)]


def _torch_seconds(q: Any, k: Any, v: Any, is_causal: bool) -> dict[str, float]:
    """What torch's backends take in float32; one that refuses the problem is left out."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    times = {}
    for backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel([backend]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says why the other backends are not taken
                times[backend.name.lower()] = seconds(
                    lambda: scaled_dot_product_attention(q, k, v, is_causal=is_causal)
                )
        except RuntimeError:  # no kernel for float32, or out of memory
            _torch().cuda.empty_cache()
    return times
