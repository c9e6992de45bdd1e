"""The machine: counting rules, capacity, and no arithmetic on what was not loaded."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simattn import SRAMCapacityError
from simattn.counts import Flops, SRAMTraffic
from simattn.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32
from simattn.memory import HBM, SRAM


def machine(dtype=FLOAT32, capacity_bytes=None, **tensors) -> tuple[HBM, SRAM]:
    hbm = HBM()
    for name, array in tensors.items():
        hbm.place(name, np.asarray(array, dtype.holder), dtype)
    return hbm, SRAM(dtype, capacity_bytes)


# Arithmetic on data that was not loaded is impossible


@pytest.mark.parametrize("op", [operator.matmul, operator.add, operator.mul, operator.sub,
                                operator.truediv, operator.gt])  # fmt: skip
def test_hbm_data_takes_no_part_in_arithmetic(op) -> None:
    hbm, sram = machine(Q=np.ones((2, 2)))
    tile = sram.load(hbm.Q)
    for a, b in ((hbm.Q, hbm.Q), (hbm.Q, tile), (tile, hbm.Q), (hbm.Q, 1.0), (np.ones(2), hbm.Q)):
        with pytest.raises((TypeError, AttributeError)):
            op(a, b)


@pytest.mark.parametrize(
    "read",
    [np.asarray, np.exp, np.sum, float, list, lambda x: x[0][0] + 0, lambda x: x.tolist(),
     lambda x: np.maximum(x, x), lambda x: np.asarray([x]), bytes],
)  # fmt: skip
def test_neither_memory_can_be_read_but_through_the_machine(read) -> None:
    hbm, sram = machine(Q=np.ones((2, 2)))
    for place in (hbm.Q, hbm.Q[0:1], sram.load(hbm.Q)):
        with pytest.raises((TypeError, AttributeError, ValueError)):
            read(place)


def test_hbm_changes_by_store_alone() -> None:
    hbm, sram = machine(Q=np.ones((2, 2)), O=np.zeros((2, 2)))
    with pytest.raises(TypeError):
        hbm.O[0:1] = hbm.Q[0:1]  # type: ignore[index]
    tile = sram.load(hbm.Q)
    tile += tile  # the tile is a copy: HBM keeps its ones
    sram.store(hbm.O, sram.load(hbm.Q))
    assert (hbm.O._data == 1).all()


def test_a_tensor_never_stored_to_is_nan() -> None:
    hbm, _ = machine(Q=np.ones((2, 2)))
    hbm.alloc("m", (3,), FLOAT32)
    assert np.isnan(hbm.m._data).all()
    with pytest.raises(AttributeError):
        hbm.undefined  # noqa: B018


def test_nothing_is_computed_before_a_mistake_is_noticed() -> None:
    hbm, sram = machine(Q=np.ones((2, 2)), O=np.zeros((2, 2)))
    tile = sram.load(hbm.Q)
    for mistake in (lambda: operator.iadd(tile, hbm.Q), lambda: sram.store(hbm.O, hbm.Q)):
        with pytest.raises(AttributeError):
            mistake()
    sram.store(hbm.O, tile)
    assert (hbm.O._data == 1).all()


def test_a_freed_tile_is_gone() -> None:
    hbm, sram = machine(Q=np.ones((2, 2)))
    tile = sram.load(hbm.Q)
    sram.free(tile)
    with pytest.raises(ValueError, match="tile Q was used after it was freed"):
        tile.exp()
    with pytest.raises(ValueError, match="tile Q is not live"):
        sram.free(tile)
    with pytest.raises(ValueError, match="freed"):
        sram.store(hbm.Q, tile)


def test_store_of_another_shape_is_refused() -> None:
    hbm, sram = machine(Q=np.ones((2, 2)), O=np.zeros((1, 2)))
    with pytest.raises(ValueError, match=r"tile Q \(2, 2\) to O \(1, 2\)"):
        sram.store(hbm.O, sram.load(hbm.Q))


# What each movement and each operation costs, written out


def test_load_and_store() -> None:
    hbm, sram = machine(FLOAT16, Q=np.ones((5, 3)), O=np.zeros((5, 3)))
    tile = sram.load(hbm.Q[0:4])
    c = sram.ledger.counts()
    assert (c.traffic.reads, c.traffic.read_bytes) == ({"Q": 12}, {"Q": 24})
    assert c.sram == SRAMTraffic(read_elems=0, write_elems=12, read_bytes=0, write_bytes=24)
    assert (c.peak_sram_bytes, sram.live_bytes) == (24, 24)
    sram.store(hbm.O[0:4], tile)
    c = sram.ledger.counts()
    assert (c.traffic.writes, c.traffic.write_bytes) == ({"O": 12}, {"O": 24})
    assert c.sram == SRAMTraffic(read_elems=12, write_elems=12, read_bytes=24, write_bytes=24)


@pytest.mark.parametrize(
    ("operation", "reads", "writes", "flops"),
    [  # of A [4, 6], B [6, 5], C [4, 5], vectors m, x [4]
        (lambda t: t["A"] @ t["B"], 24 + 30, 20, Flops(2 * 4 * 6 * 5, 0, 0)),
        (lambda t: t["C"].accumulate(t["A"], t["B"]), 20 + 24 + 30, 20, Flops(240, 0, 0)),
        (lambda t: t["A"].rowmax(t["m"]), 24 + 4, 4, Flops(0, 24 + 4, 0)),
        (lambda t: t["m"].add_rowsum(t["A"]), 24 + 4, 4, Flops(0, 24 + 4, 0)),
        (lambda t: t["m"].maximum(t["x"]), 8, 4, Flops(0, 4, 0)),
        (lambda t: t["A"].scale(2.0), 24, 24, Flops(0, 24, 0)),
        (lambda t: t["A"].shift(t["m"]), 28, 24, Flops(0, 24, 0)),
        (lambda t: t["A"].exp(), 24, 24, Flops(0, 0, 24)),
        (lambda t: t["A"].log(), 24, 24, Flops(0, 24, 0)),
        (lambda t: t["A"].hide(np.ones((4, 6), bool)), 0, 0, Flops(0, 0, 0)),
        (lambda t: operator.iadd(t["m"], t["x"]), 8, 4, Flops(0, 4, 0)),
        (lambda t: operator.imul(t["A"], t["m"]), 28, 24, Flops(0, 24, 0)),
        (lambda t: operator.itruediv(t["A"], t["m"]), 28, 24, Flops(0, 24, 0)),
    ],
)
def test_an_operation_reads_its_operands_and_writes_its_result_once(
    operation, reads, writes, flops
) -> None:
    shapes = {"A": (4, 6), "B": (6, 5), "C": (4, 5), "m": (4,), "x": (4,)}
    hbm, sram = machine(**{name: np.ones(shape) for name, shape in shapes.items()})
    tiles = {name: sram.load(getattr(hbm, name)) for name in shapes}
    before = sram.ledger.counts().sram
    operation(tiles)
    after = sram.ledger.counts()
    assert after.sram.read_elems - before.read_elems == reads
    assert after.sram.write_elems - before.write_elems == writes
    assert after.sram.read_bytes - before.read_bytes == 4 * reads
    assert after.flops == flops


def test_a_narrow_tile_is_widened_when_it_is_overwritten() -> None:
    hbm, sram = machine(BFLOAT16, Q=np.ones((4, 6)))
    Q = sram.load(hbm.Q)
    assert sram.live_bytes == 48
    P = Q.exp()
    assert sram.live_bytes == 96  # float32 now, and the 2-byte tile is free
    c = sram.ledger.counts()
    assert c.peak_sram_bytes == 48 + 96
    assert (c.sram.read_bytes, c.sram.write_bytes) == (48, 48 + 96)
    with pytest.raises(ValueError, match="freed"):
        Q.exp()
    assert P.exp() is P


@given(st.sampled_from(list(DTYPES.values())), st.integers(1, 8), st.integers(1, 8))
def test_capacity_is_enforced_to_the_byte(dtype, rows, columns) -> None:
    need = rows * columns * dtype.width_bytes
    hbm, sram = machine(dtype, capacity_bytes=2 * need, Q=np.ones((rows, columns)))
    first = sram.load(hbm.Q)
    sram.load(hbm.Q)
    with pytest.raises(SRAMCapacityError, match=rf"tile Q needs {need} bytes; live: Q {need}, Q"):
        sram.load(hbm.Q)
    assert sram.ledger.counts().traffic.reads == {"Q": 2 * rows * columns}
    sram.free(first)
    sram.load(hbm.Q)
    hbm, sram = machine(dtype, capacity_bytes=need - 1, Q=np.ones((rows, columns)))
    with pytest.raises(ValueError, match=f"live: none; capacity: {need - 1}"):
        sram.load(hbm.Q)
    assert sram.live_bytes == sram.ledger.peak_bytes == 0
