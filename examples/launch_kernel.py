"""Both loop orders on a GPU: their error, their time, and the traffic that the model predicts.

    python examples/launch_kernel.py

Without a GPU, small, under Numba's simulator:

    NUMBA_ENABLE_CUDASIM=1 python examples/launch_kernel.py
"""

import os
import sys

import numpy as np

import kernels
import simattn
from simattn import exact

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
HEADS, N, D, BLOCK = (1, 20, 8, 8) if SIMULATED else (16, 1024, 64, 64)


def milliseconds(q, k, v, variant) -> float:
    """Time of a launch on arrays that are on the GPU already."""
    from numba import cuda

    q, k, v = (cuda.to_device(x) for x in (q, k, v))
    out = cuda.device_array_like(q)
    times = []
    for _ in range(6):
        start, end = cuda.event(), cuda.event()
        start.record()
        kernels.flash_attention(q, k, v, variant=variant, block_q=BLOCK, block_k=BLOCK, out=out)
        end.record()
        end.synchronize()
        times.append(cuda.event_elapsed_time(start, end))
    return min(times)


def main() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((HEADS, N, D), dtype=np.float32) for _ in range(3))
    right, _ = exact.attention(q, k, v)
    outs = {
        variant: kernels.flash_attention(q, k, v, variant=variant, block_q=BLOCK, block_k=BLOCK)
        for variant in ("q_outer", "kv_outer")
    }
    print(f"{HEADS} heads, {N} queries and keys, width {D}, tiles of {BLOCK} x {BLOCK}, float32")
    for variant, out in outs.items():
        predicted = simattn.predict(
            variant, heads=HEADS, n=N, d=D, block_q=BLOCK, block_k=BLOCK
        ).traffic
        print(f"{variant}: largest error {np.abs(out - right).max():.0e}")
        if not SIMULATED:
            print(f"  time      {milliseconds(q, k, v, variant):.3f} ms")
        print(f"  predicted {predicted.total_read_elems} elements read", end=", ")
        print(f"{predicted.total_write_elems} written, {predicted.total_bytes} bytes in all")


if __name__ == "__main__":
    try:
        main()
    except (ImportError, RuntimeError) as error:  # no Numba, or no GPU
        print(f"launch_kernel: {error}", file=sys.stderr)
        sys.exit(2)
