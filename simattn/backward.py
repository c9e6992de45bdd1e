"""The gradients of attention, as loop nests over two memories: dQ, dK and dV from dO.

``standard_backward`` is FlashAttention's (arXiv 2205.14135) Algorithm 3: P comes from the forward
pass, dP and dS go through HBM. ``kv_outer_backward`` is its Algorithm 4: P is computed again from
Q, K, m and l, tile by tile, and dQ travels as O does in ``kv_outer``. With

    D  = rowsum(dO * O) = rowsum(P * dP)
    dS = P * (dP - D)          dP = dO V^T

the gradients are dV = P^T dO, dQ = scale dS K and dK = scale dS^T Q.

Each needs what its forward pass leaves in HBM (``FORWARD``). Gradients lie in HBM at the storage
width of what they are gradients of: dQ is rounded at each of its visits. The closed forms are in
``iomodel_backward.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from simattn import checks, variants
from simattn.counts import Counts
from simattn.iomodel_backward import predict_backward
from simattn.masks import TileGrid
from simattn.memory import HBM, SRAM, Ledger
from simattn.variants import scores

if TYPE_CHECKING:
    from simattn.dtypes import Array
    from simattn.memory import Region


def standard_backward(hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float) -> None:
    """Five passes, with P, dP and dS in HBM. Masked or not, all of them move."""
    hbm.alloc("dP", (grid.n, grid.s), hbm.Q.dtype)
    hbm.alloc("dS", (grid.n, grid.s), hbm.Q.dtype)
    for j in grid.key_tiles():
        dV = sram.full((j.stop - j.start, hbm.V.shape[1]), 0.0, "dV")  # [Bc, e]
        for i in grid.row_tiles():
            P, dO = sram.load(hbm.P[i, j]), sram.load(hbm.dO[i])  # [Br, Bc], [Br, e]
            dV.accumulate(P.T, dO)
            sram.free(P, dO)
        sram.store(hbm.dV[j], dV)
        sram.free(dV)
    for i in grid.row_tiles():
        dO = sram.load(hbm.dO[i])  # [Br, e]
        for j in grid.key_tiles():
            V = sram.load(hbm.V[j])  # [Bc, e]
            dP = dO @ V.T  # [Br, Bc]
            sram.store(hbm.dP[i, j], dP)
            sram.free(V, dP)
        sram.free(dO)
    for i in grid.row_tiles():  # strips of whole rows
        P, dP = sram.load(hbm.P[i]), sram.load(hbm.dP[i])  # [Br, s]
        D = sram.full((i.stop - i.start,), 0.0, "D")  # [Br]
        dS = dP.times(P)
        D.add_rowsum(dS)
        P *= D.scale(-1.0)
        dS += P  # P * dP - D * P
        sram.free(P, D)
        sram.store(hbm.dS[i], dS.scale(scale))
        sram.free(dS)
    for i in grid.row_tiles():
        dQ = sram.full((i.stop - i.start, hbm.Q.shape[1]), 0.0, "dQ")  # [Br, d]
        for j in grid.key_tiles():
            dS, K = sram.load(hbm.dS[i, j]), sram.load(hbm.K[j])  # [Br, Bc], [Bc, d]
            dQ.accumulate(dS, K)
            sram.free(dS, K)
        sram.store(hbm.dQ[i], dQ)
        sram.free(dQ)
    for j in grid.key_tiles():
        dK = sram.full((j.stop - j.start, hbm.K.shape[1]), 0.0, "dK")  # [Bc, d]
        for i in grid.row_tiles():
            dS, Q = sram.load(hbm.dS[i, j]), sram.load(hbm.Q[i])  # [Br, Bc], [Br, d]
            dK.accumulate(dS.T, Q)
            sram.free(dS, Q)
        sram.store(hbm.dK[j], dK)
        sram.free(dK)


def kv_outer_backward(hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float) -> None:
    """K, V, dK, dV tiles stay in SRAM while Q, O, dO, m, l stream and dQ travels through HBM."""

    def zero(region: Region, rows: slice, name: str) -> None:
        tile = sram.full((rows.stop - rows.start, region.shape[1]), 0.0, name)
        sram.store(region[rows], tile)
        sram.free(tile)

    for i in grid.row_tiles():
        zero(hbm.dQ, i, "dQ")
    for j in grid.key_tiles():
        zero(hbm.dK, j, "dK")
        zero(hbm.dV, j, "dV")
    for j in grid.key_tiles_seen():
        K, V = sram.load(hbm.K[j]), sram.load(hbm.V[j])  # [Bc, d], [Bc, e]
        dK = sram.full(K.shape, 0.0, "dK")
        dV = sram.full(V.shape, 0.0, "dV")
        for i in grid.row_tiles_that_see(j):
            Q, O, dO = sram.load(hbm.Q[i]), sram.load(hbm.O[i]), sram.load(hbm.dO[i])
            dQ, m, l = sram.load(hbm.dQ[i]), sram.load(hbm.m[i]), sram.load(hbm.l[i])
            P = scores(Q, K, scale, grid.visible(i, j)).shift(m).exp()  # [Br, Bc]
            P /= l
            sram.free(m, l)
            dV.accumulate(P.T, dO)
            dP = dO @ V.T  # [Br, Bc]
            D = sram.full((Q.shape[0],), 0.0, "D")  # [Br]
            OdO = O.times(dO)  # [Br, e]
            D.add_rowsum(OdO)
            sram.free(OdO, dO)
            dS = dP.shift(D).times(P).scale(scale)  # [Br, Bc]
            sram.free(P, D)
            more = dS @ K  # [Br, d]
            more += dQ
            sram.store(hbm.dQ[i], more)
            sram.free(dQ, more)
            dK.accumulate(dS.T, Q)
            sram.free(Q, dS)
        sram.store(hbm.dK[j], dK)
        sram.store(hbm.dV[j], dV)
        sram.free(K, V, dK, dV)


FORWARD: dict[str, Callable[..., None]] = {  # what leaves P, or O, m and l, in HBM
    "standard_backward": variants.standard_row,
    "kv_outer_backward": variants.kv_outer,
}
BACKWARD: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (standard_backward, kv_outer_backward)
}


@dataclass(frozen=True, slots=True)
class Gradients:
    """dQ, dK, dV, and what it took: the backward pass alone, and the forward pass before it."""

    variant: str
    block_q: int
    block_k: int
    dq: Array = field(repr=False)
    dk: Array = field(repr=False)
    dv: Array = field(repr=False)
    counts: Counts
    predicted: Counts = field(repr=False)
    forward: Counts = field(repr=False)


def attention_backward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dout: ArrayLike,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    variant: str = "kv_outer_backward",
    block_q: int = 64,
    block_k: int = 64,
    sram_bytes: int | None = None,
    dtype: str | None = None,
) -> Gradients:
    """Gradients of sum(dout * attention(q, k, v)), forward and backward passes counted apart.

    Parameters
    ----------
    q, k, v, is_causal, scale, window_size, dtype
        As in `simattn.attention`; finite, and as many K/V heads as query heads.
    dout : (..., heads, n, e)
        The gradient of the output.
    variant : str
        ``standard_backward`` or ``kv_outer_backward``.
    block_q, block_k : int
        Rows of a tile, clamped to n and s.
    sram_bytes : int, optional
        Capacity of one program's SRAM in the backward pass.

    Raises
    ------
    ValueError, TypeError
        One line that names the argument, its value and the rule.

    Examples
    --------
    >>> x = np.ones((8, 4), np.float32)
    >>> g = attention_backward(x, x, x, x, block_q=2, block_k=4)
    >>> g.dv[0].tolist(), g.counts.traffic.total_elems, 7 * 8 * 4 + 2 * (5 * 8 * 4 + 2 * 8)
    ([1.0, 1.0, 1.0, 1.0], 576, 576)
    """
    if variant not in BACKWARD:
        raise ValueError(f"variant {variant!r}: must be one of {', '.join(BACKWARD)}")
    named = {"q": q, "k": k, "v": v, "dout": dout}
    given = {name: checks.array(name, x) for name, x in named.items()}
    storage = checks.storage_of(given, dtype)
    stored = {name: checks.stored(x, storage) for name, x in given.items()}
    Q, K, V = checks.with_heads(stored["q"], stored["k"], stored["v"])
    if K.shape[-3] != Q.shape[-3]:
        raise ValueError(f"k {K.shape}: must have as many heads as q, {Q.shape[-3]}")
    dO = stored["dout"]
    if dO.shape != (*stored["q"].shape[:-1], V.shape[-1]):
        raise ValueError(f"dout {dO.shape}: must have the shape of the output")
    dO = dO.reshape((*Q.shape[:-1], V.shape[-1]))
    for name, x in stored.items():
        if not np.isfinite(x).all():
            raise ValueError(f"{name}: must be finite")
    (*batch, heads, n, d), (s, e) = Q.shape, V.shape[-2:]
    factor = 1 / math.sqrt(d) if scale is None else checks.finite("scale", scale)
    left, right = checks.window(window_size)
    Br = min(checks.whole("block_q", block_q), max(n, 1))
    Bc = min(checks.whole("block_k", block_k), max(s, 1))
    grid = TileGrid(n, s, Br, Bc, (left, 0 if is_causal else right))
    forward, backward = Ledger(), Ledger()
    dQ, dK, dV = (np.empty_like(x) for x in (Q, K, V))
    with np.errstate(all="ignore"):
        for head in np.ndindex(Q.shape[:-2]):
            hbm = HBM()
            for name, array in {"Q": Q, "K": K, "V": V, "dO": dO, "dQ": dQ, "dK": dK, "dV": dV,
                                "O": np.empty_like(dO)}.items():  # fmt: skip
                hbm.place(name, array[head], storage)
            FORWARD[variant](hbm, SRAM(storage, None, forward), grid, scale=factor, lse=False)
            BACKWARD[variant](hbm, SRAM(storage, sram_bytes, backward), grid, scale=factor)
    shape: dict[str, Any] = {
        "n": n, "n_k": s, "d": d, "dv": e, "heads": heads, "batch": math.prod(batch),
        "is_causal": is_causal, "window_size": (left, right), "dtype": storage.name,
    }  # fmt: skip
    predicted = predict_backward(variant, block_q=Br, block_k=Bc, **shape)
    dq, dk, dv = (
        x.reshape(stored[name].shape) for name, x in zip("qkv", (dQ, dK, dV), strict=True)
    )
    return Gradients(variant, Br, Bc, dq, dk, dv, backward.counts(), predicted, forward.counts())
