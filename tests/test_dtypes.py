"""Storage formats: rounding checked against ml_dtypes and against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import simattn
from simattn.dtypes import DTYPES, round_to_bfloat16

float32_bits = st.integers(0, 2**32 - 1).map(lambda b: np.array(b, np.uint32).view(np.float32))


@given(float32_bits)
def test_bfloat16_equals_ml_dtypes(x) -> None:
    with np.errstate(invalid="ignore"):
        other = np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(round_to_bfloat16(x), other)


def test_bfloat16_equals_ml_dtypes_on_a_million_patterns() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=np.uint32)
    x = np.concatenate([bits, np.arange(0, 2**32, 2**13, dtype=np.uint32)]).view(np.float32)
    with np.errstate(invalid="ignore"):
        other = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(round_to_bfloat16(x), other)


@given(st.floats(allow_nan=False, allow_infinity=False, width=64, max_value=1e38, min_value=-1e38))
def test_bfloat16_of_float64_is_rounded_once(x: float) -> None:
    """To nearest, ties to even, in exact arithmetic; by way of float32 there would be two."""
    got = float(round_to_bfloat16(np.float64(x)))
    bits = int(np.array(got, np.float32).view(np.uint32)) >> 16
    neighbours = [np.array((bits + step) << 16, np.uint32).view(np.float32) for step in (-1, 1)
                  if 0 <= bits + step < 2**16]  # fmt: skip
    off = abs(Fraction(got) - Fraction(x))
    for other in map(float, neighbours):
        if np.isfinite(other):
            assert off < abs(Fraction(other) - Fraction(x)) or (
                off == abs(Fraction(other) - Fraction(x)) and bits % 2 == 0
            )


def test_a_case_where_two_roundings_differ_from_one() -> None:
    just_above_a_tie = 1 + 2.0**-8 + 2.0**-40
    assert float(round_to_bfloat16(np.float32(just_above_a_tie))) == 1.0
    assert float(round_to_bfloat16(np.float64(just_above_a_tie))) == 1 + 2.0**-7


@pytest.mark.parametrize("name", DTYPES)
def test_widths_and_limits(name: str) -> None:
    dtype = DTYPES[name]
    kind = ml_dtypes.finfo(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    assert dtype.width_bytes == kind.bits // 8
    assert dtype.eps == float(kind.eps)
    assert dtype.accumulator.width_bytes == max(4, dtype.width_bytes)
    x = np.float64([1 + float(kind.eps), 1 + float(kind.eps) / 2])
    np.testing.assert_array_equal(dtype.round(x), [1 + float(kind.eps), 1])


def test_bfloat16_arrays_come_back_as_they_came() -> None:
    x = np.ones((1, 4, 8), ml_dtypes.bfloat16)
    run = simattn.attention(x, x, x)
    assert run.out.dtype == x.dtype
    assert run.traffic.read_bytes["Q"] == 2 * 32
