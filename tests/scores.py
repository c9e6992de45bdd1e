"""Scores that hurt maxima: kept from earlier tiles, or rounded."""

from __future__ import annotations

import numpy as np

from simattn import exact

KINDS = ("grow", "jump", "alternate", "overflow float16", "fall", "huge")


def keys_of(kind, s, d, *, last_first):
    """Keys [s, d] for queries whose first component is 256, the others about 1, and scale 1.

    ``last_first``: in which order the kernel visits them.
    """
    rng = np.random.default_rng(1)
    j = np.arange(s)[::-1] if last_first else np.arange(s)
    sizes = {
        "grow": 0.5 * j,
        "jump": np.where(j == (s - 40 if last_first else 40), 4000.0, 0.0),
        "alternate": 3000.0 * (j // 32 % 2),
        "overflow float16": 70000.0 * (j > s // 2),
        "fall": -200.0 * j,
        "huge": 1e4 * np.sign(rng.standard_normal(s)),
    }[kind]
    K = 0.1 * rng.standard_normal((s, d))
    K[:, 0] = sizes / 256
    return K


def larger_than_their_octaves(dtype):
    """Several q [1, n, 16], k and v [1, 60, 16]: m, about 10**9, is rounded to 64 and more.

    Then the largest weight would be 2**-32 or infinite.
    """
    rng = np.random.default_rng(5)
    v = np.random.default_rng(0).standard_normal((1, 60, 16)).astype(dtype)
    for n in (*[1] * 8, 40):
        q, k = (1 + 0.3 * rng.standard_normal((1, rows, 16)) for rows in (n, 60))
        yield (3e4 * q).astype(dtype), (2e4 * k).astype(dtype), v


def check_octaves(attention, layout, dtype):
    """`larger_than_their_octaves` as near float64 as float32 can tell two such scores apart."""
    for q, k, v in larger_than_their_octaves(dtype):
        mask = {"is_causal": q.shape[1] > 1}
        done = attention(q, k, v, layout=layout, return_lse=True, **mask)
        done.report.check()
        right, L = exact.attention(*(x.astype(float) for x in (q, k, v)), **mask)
        best = np.abs(done.out.astype(np.float64) - right).max(axis=-1) < 0.02
        assert best.mean() > 0.9
        assert np.abs(done.lse / L - 1).max() < 1e-6
