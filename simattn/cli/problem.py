"""The problem of a command line: its sizes, and its inputs, random or of a file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simattn import checks
from simattn.cli.arguments import UsageError, refuse
from simattn.dtypes import DTYPES, Array, DType

ARRAYS = {"q", "k", "v", "x"}
SIZES = ("n", "n_k", "d", "dv", "heads", "kv_heads", "batch")


@dataclass(frozen=True, slots=True)
class Problem:
    """What to compute, on a file's ``arrays``, or else on random ones, drawn when needed."""

    n: int
    n_k: int
    d: int
    dv: int
    heads: int
    kv_heads: int
    batch: int
    dtype: str
    is_causal: bool
    window_size: tuple[int, int]
    scale: float
    splits: int | None
    return_lse: bool
    seed: int
    arrays: tuple[Array, Array, Array] | None = field(repr=False)

    @property
    def shape(self) -> dict[str, Any]:
        """The arguments of `simattn.predict`, variant and tiles aside."""
        names = (*SIZES, "dtype", "is_causal", "window_size", "splits", "return_lse")
        return {name: getattr(self, name) for name in names}

    @property
    def input_elems(self) -> int:
        kv_rows = self.batch * self.kv_heads * self.n_k
        return self.batch * self.heads * self.n * self.d + kv_rows * (self.d + self.dv)

    @property
    def output_elems(self) -> int:
        return self.batch * self.heads * self.n * self.dv

    def inputs(self) -> tuple[Array, Array, Array]:
        """Q, K, V as stored: (batch, heads, rows, width)."""
        if self.arrays is not None:
            return self.arrays
        draw = np.random.default_rng(self.seed).standard_normal
        rounded = DTYPES[self.dtype].round
        return (
            rounded(draw((self.batch, self.heads, self.n, self.d))),
            rounded(draw((self.batch, self.kv_heads, self.n_k, self.d))),
            rounded(draw((self.batch, self.kv_heads, self.n_k, self.dv))),
        )

    def title(self) -> list[str]:
        masks = ["causal"] if self.is_causal else []
        if self.window_size != (-1, -1):
            masks.append("window {},{}".format(*self.window_size))
        return [
            ", ".join(f"{name} {getattr(self, name)}" for name in SIZES),
            f"{self.dtype}, {' and '.join(masks) or 'no mask'}, scale {self.scale:.6g}",
        ]


def problem_of(args: argparse.Namespace) -> Problem:
    arrays = None
    if args.input is not None:
        refuse(args, SIZES, "not with --input, whose arrays have sizes")
        q, k, v, storage = read_qkv(args.input, read_npz(args.input), "qkv", args.dtype)
        (batch, heads, n, d), (_, kv_heads, n_k, dv) = q.shape, v.shape
        arrays, dtype = (q, k, v), storage.name
    else:
        n, d, heads, batch = args.n or 1024, args.d or 64, args.heads or 1, args.batch or 1
        n_k, dv, kv_heads = args.n_k or n, args.dv or d, args.kv_heads or heads
        dtype = args.dtype or "float32"
        if heads % kv_heads:
            raise UsageError(f"--kv-heads {kv_heads}: must divide --heads {heads}")
    return Problem(
        n=n, n_k=n_k, d=d, dv=dv, heads=heads, kv_heads=kv_heads, batch=batch, dtype=dtype,
        is_causal=args.causal, window_size=args.window,
        scale=1 / math.sqrt(d) if args.scale is None else args.scale,
        splits=args.splits, return_lse=args.lse, seed=args.seed, arrays=arrays,
    )  # fmt: skip


def read_qkv(
    path: str, found: dict[str, Array], names: Sequence[str], dtype: str | None
) -> tuple[Array, Array, Array, DType]:
    """Q, K, V of a file as stored, in four dimensions, and their format. Without v, V is K."""
    for name in names:
        if name not in found:
            raise UsageError(f"--input {path}: has no array {name}, must hold {', '.join(names)}")
        if found[name].ndim not in (2, 3, 4):
            raise UsageError(
                f"--input {path}: {name} {found[name].shape} must be (rows, width), (heads, rows, "
                "width) or (batch, heads, rows, width)"
            )
    arrays, storage = read_stored(path, found, names, dtype)
    try:
        shaped = checks.with_heads(arrays[0], arrays[1], arrays[-1])
    except ValueError as error:
        raise UsageError(f"--input {path}: {error}") from None
    q, k, v = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in shaped)
    return q, k, v, storage


def read_stored(
    path: str, found: dict[str, Array], names: Sequence[str], dtype: str | None
) -> tuple[list[Array], DType]:
    """Arrays of a file, rounded to the format asked for, or else to their own."""
    for name in names:
        if found[name].dtype == np.dtype("V2"):
            raise UsageError(
                f"--input {path}: {name} may be bfloat16, which .npz files can't say; it must be "
                "saved as float32 and read with --dtype bfloat16"
            )
    try:
        given = {name: checks.array(name, found[name]) for name in names}
        storage = checks.storage_of(given, dtype)
    except TypeError as error:
        raise UsageError(f"--input {path}: {error}") from None
    stored = [checks.stored(x, storage) for x in given.values()]
    for name, after in zip(names, stored, strict=True):
        bad = np.count_nonzero(~np.isfinite(given[name]))
        if bad:
            raise UsageError(
                f"--input {path}: {name} holds {bad} NaN or infinite values, must be finite"
            )
        bad = np.count_nonzero(~np.isfinite(after))
        if bad:
            raise UsageError(
                f"--dtype {storage.name}: {bad} values of {name} in {path} are beyond its range"
            )
    return stored, storage


def read_npz(path: str) -> dict[str, Array]:
    """The arrays of a file that a command may ask for."""
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a single array without a name")
            return {name: np.asarray(archive[name]) for name in archive.files if name in ARRAYS}
    except Exception as error:  # a broken file makes the reader raise almost anything
        reason = (isinstance(error, OSError) and error.strerror) or error
        if "pickle" in str(reason):
            reason = "not an archive, or arrays of Python objects"
        raise UsageError(f"--input {path}: must be a readable .npz of arrays ({reason})") from None
