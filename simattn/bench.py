"""What counting costs: the counted tiled run beside the same loop in bare NumPy, and plain NumPy.

The three are timed in turn, round after round in one process, so that a change in the machine's
speed meets all of them; ratios are taken within a round, and their median reported. The process is
a fresh one in which the BLAS has the threads asked for: with one, loops are compared, not how well
small matrix products share cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median

import numpy as np
from numpy.typing import NDArray

from simattn.run import attention

Float32 = NDArray[np.float32]
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def counted(Q: Float32, K: Float32, V: Float32, block: int) -> Float32:
    """``q_outer`` on the simulated memories."""
    return attention(Q, K, V, variant="q_outer", block_q=block, block_k=block).out


def uncounted(Q: Float32, K: Float32, V: Float32, block: int) -> Float32:
    """The same tiles, the same steps, no counters."""
    heads, n, d = Q.shape
    scale = np.float32(1 / np.sqrt(d))
    out = np.empty((heads, n, V.shape[-1]), np.float32)
    for h in range(heads):
        for i in range(0, n, block):
            Qi = Q[h, i : i + block]  # [Br, d]
            m = np.full(len(Qi), -np.inf, np.float32)  # [Br]
            l = np.zeros(len(Qi), np.float32)  # [Br]
            acc = np.zeros((len(Qi), V.shape[-1]), np.float32)  # [Br, e]
            for j in range(0, K.shape[1], block):
                S = Qi @ K[h, j : j + block].T  # [Br, Bc]
                S *= scale
                m_new = np.maximum(m, S.max(axis=1))  # [Br]
                c = np.exp(m - m_new)  # [Br]
                S -= m_new[:, None]
                P = np.exp(S, out=S)  # [Br, Bc]
                l *= c
                l += P.sum(axis=1)
                acc *= c[:, None]
                acc += P @ V[h, j : j + block]
                m = m_new
            acc /= l[:, None]
            out[h, i : i + block] = acc
    return out


def plain(Q: Float32, K: Float32, V: Float32, block: int) -> Float32:
    """softmax(Q K^T / sqrt(d)) V, all heads at once; ``block`` plays no part."""
    S = Q @ K.swapaxes(-1, -2)  # [heads, n, s]
    S *= np.float32(1 / np.sqrt(Q.shape[-1]))
    S -= S.max(axis=-1, keepdims=True)
    P = np.exp(S, out=S)
    P /= P.sum(axis=-1, keepdims=True)
    return np.asarray(P @ V)


LOOPS: dict[str, Callable[[Float32, Float32, Float32, int], Float32]] = {
    f.__name__: f for f in (counted, uncounted, plain)
}


Result = list[dict[str, str | int | float]]


def bench(*, threads: int = 1, **options: int) -> Result:
    """`measure` in a process of its own, whose BLAS runs ``threads`` threads."""
    kept = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(measure, **options).result()
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def measure(
    *, heads: int = 4, n: int = 4096, d: int = 64, block: int = 256, repeat: int = 7, seed: int = 0
) -> Result:
    """A row per loop, float32: its seconds, what it costs over ``uncounted``, its speed over
    ``plain``; each by the median and by the fastest round."""
    rng = np.random.default_rng(seed)
    Q, K, V = (rng.standard_normal((heads, n, d), dtype=np.float32) for _ in "QKV")
    seconds: dict[str, list[float]] = {name: [] for name in LOOPS}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in LOOPS}
    for _ in range(repeat):
        for name, loop in LOOPS.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            loop(Q, K, V, block)
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu_start)

    def ratio(over: str, under: str) -> float:
        return median(a / b for a, b in zip(seconds[over], seconds[under], strict=True))

    fastest = {name: min(taken) for name, taken in seconds.items()}
    cpu = {name: min(taken) for name, taken in cpu_seconds.items()}
    return [
        {
            "loop": name, "heads": heads, "n": n, "d": d, "block": block, "repeat": repeat,
            "median_s": median(seconds[name]), "min_s": fastest[name],
            "overhead_percent": 100 * (ratio(name, "uncounted") - 1),
            "min_overhead_percent": 100 * (fastest[name] / fastest["uncounted"] - 1),
            "speed_over_plain": ratio("plain", name),
            "min_speed_over_plain": fastest["plain"] / fastest[name],
            "min_cpu_s": cpu[name],
        }
        for name in LOOPS
    ]  # fmt: skip
