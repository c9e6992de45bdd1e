"""What the property tests draw: shapes, tiles, masks, storage formats, and values meant to hurt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from simattn.dtypes import DTYPES
from simattn.variants import VARIANTS

KINDS = ("normal", "huge logits", "ties", "constant", "denormal", "zeros", "one large key")


@dataclass(frozen=True)
class Problem:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict  # of simattn.attention
    kind: str


def values(rng: np.random.Generator, kind: str, q_shape, k_shape, v_shape):
    q, k, v = (rng.standard_normal(shape) for shape in (q_shape, k_shape, v_shape))
    match kind:
        case "huge logits":  # scores of +-1e4, before scaling
            q, k = 100.0 * np.sign(q), 100.0 * np.sign(k) / q_shape[-1]
        case "ties":
            q, k, v = np.round(q), np.round(k), np.round(v)
        case "constant":
            q, k, v = np.full(q_shape, 0.5), np.full(k_shape, 2.0), np.full(v_shape, 3.0)
        case "denormal":
            q, k, v = q * 1e-20, k * 1e-20, v * 1e-40
        case "zeros":
            q, k, v = 0 * q, 0 * k, 0 * v
        case "one large key":
            k[..., -1:, :] *= 50
    return q, k, v


windows = st.one_of(
    st.just((-1, -1)), st.tuples(st.integers(-1, 12), st.integers(-1, 12))
)  # keys seen before and after a row's own position


@st.composite
def problems(draw, max_rows=24, kinds=KINDS, variants=tuple(VARIANTS), dtypes=tuple(DTYPES)):
    kind = draw(st.sampled_from(kinds))
    n, s = draw(st.integers(0, max_rows)), draw(st.integers(0, max_rows))
    d, e = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    batch = draw(st.sampled_from([(), (1,), (2,), (2, 1)]))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_lead, kv_lead = (*batch, kv_heads * group), (*batch, kv_heads)
    if draw(st.booleans()):
        q_lead = kv_lead = ()  # one head, two dimensions
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q, k, v = values(rng, kind, (*q_lead, n, d), (*kv_lead, s, d), (*kv_lead, s, e))
    options = {
        "variant": draw(st.sampled_from(variants)),
        "block_q": draw(st.integers(1, 10)),
        "block_k": draw(st.integers(1, 10)),
        "splits": draw(st.one_of(st.none(), st.integers(1, 7))),
        "is_causal": draw(st.booleans()),
        "window_size": draw(windows),
        "scale": draw(st.sampled_from([None, 1.0, 0.0, -0.5, 2.0])),
        "dtype": draw(st.sampled_from(dtypes)),
        "return_lse": draw(st.booleans()),
    }
    return Problem(q, k, v, options, kind)
