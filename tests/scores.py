"""Keys whose scores go up and down in ways that hurt maxima which are kept from earlier tiles."""

from __future__ import annotations

import numpy as np

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
