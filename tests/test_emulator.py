"""The emulator: what it computes, what it counts, and that it catches every planted fault."""

from __future__ import annotations

import doctest
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

import emulated_kernels
from emulated_kernels import FAULTS, SHARED_BYTES, THREADS, product, transposer

import kernels
from kernels import (
    emulated,
    mma_layout,
    ptx,
    sm90_layout,
    sm90_schedule,
    tensor_core,
    tensor_maps,
)
from kernels._cuda import cuda, types
from kernels.emulator import KernelFaultError, Placed, boxes, emulate, flow, memory
from kernels.emulator.memory import APART, FIRST_ADDRESS
from kernels.ptx import (
    atom_global_add,
    ballot,
    bar_arrive,
    bar_sync,
    i32,
    ld_global_b32,
    ld_shared_b32,
    shared_address,
    shfl_idx,
    st_global_b32,
    st_global_f32,
    st_shared_b32,
    u32,
    u64,
)

pytestmark = pytest.mark.skipif(
    cuda.__name__.endswith("simulator"), reason="the emulator takes kernels meant for a GPU"
)
TILES = 3


def run_product(fault: str, **options):
    rng = np.random.default_rng(0)
    A, B = (rng.standard_normal((rows, 16 * TILES)).astype(np.float16) for rows in (32, 16))
    C = np.full((32, 16), np.nan, np.float32)
    report = emulate(
        product(fault), 1, THREADS, [A, B, C, TILES, 32 * TILES], shared_bytes=SHARED_BYTES,
        **options,
    )  # fmt: skip
    return C, A.astype(np.float64) @ B.T.astype(np.float64), report


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_right_kernel_has_no_faults_whenever_copies_are_done(copies, backwards):
    C, right, report = run_product("", copies=copies, backwards=backwards)
    report.check()
    np.testing.assert_allclose(C, right, rtol=0, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_caught(fault, copies):
    _, _, report = run_product(fault, copies=copies)
    assert report.faults[0].kind in FAULTS[fault], report  # what follows from it comes later
    with pytest.raises(
        KernelFaultError, match=f"^emulated_kernels.py, line [0-9]+: {report.faults[0].kind}: "
    ):
        report.check()


def test_faults_point_at_the_kernels_line():
    source = Path(emulated_kernels.__file__).read_text().splitlines()
    _, _, report = run_product("no wait")
    assert "ldmatrix_x4" in source[report.faults[0].line - 1]
    _, _, report = run_product("barrier for one warp")
    (fault,) = report.faults
    assert "bar_sync" in source[fault.line - 1]
    assert "warp 0 at bar_sync 1" in fault.detail
    assert "1 of 2 warps have ended" in fault.detail


def test_a_missing_wait_gives_wrong_values_when_copies_are_late():
    C, right, _ = run_product("no wait", copies="late")
    assert not np.allclose(C, right, atol=1e-2)


def test_a_swizzle_that_differs_between_writer_and_reader_gives_wrong_values():
    C, right, report = run_product("wrong swizzle")
    assert report.ok
    assert not np.allclose(C, right, atol=1e-2)


def test_bank_conflicts_are_counted_at_their_line():
    _, _, swizzled = run_product("")
    C, right, plain = run_product("no swizzle")
    assert np.allclose(C, right, atol=1e-4)  # right, and slow
    assert swizzled.shared.conflicts == 0
    # rows of 32 bytes: eight of them begin at four places, so that a matrix takes two passes
    assert plain.shared.conflicts == TILES * 2 * (4 + 4)
    source = Path(emulated_kernels.__file__).read_text().splitlines()
    assert all("ldmatrix_x4" in source[line - 1] for _, line in plain.conflict_lines)
    assert sum(plain.conflict_lines.values()) == plain.shared.conflicts


def test_traffic_is_counted_per_tensor_to_the_byte():
    _, _, report = run_product("")
    A, B, C = (report.tensors[name] for name in "ABC")
    assert (A.read_bytes, A.write_bytes) == (32 * 16 * TILES * 2, 0)
    assert (B.read_bytes, B.write_bytes) == (16 * 16 * TILES * 2, 0)
    assert (C.read_bytes, C.write_bytes) == (0, 32 * 16 * 4)
    assert A.read_sectors == A.read_bytes // 32  # 32 bytes of a row are one sector
    assert C.write_sectors == 2 * C.write_bytes // 32  # half a sector of each row a store
    assert report.shared.write_bytes == A.read_bytes + B.read_bytes
    assert report.shared.read_bytes == 2 * TILES * 2 * 32 * 16  # warps, tiles, matrices
    assert report.shared.read_wavefronts == 2 * TILES * 2 * 4
    assert report.instructions["mma_f16"] == 2 * 2 * TILES
    assert "no faults" in str(report)


def test_lanes_of_one_warp_race_without_syncwarp():
    x, y = np.arange(128, dtype=np.float32), np.zeros(32, np.float32)
    emulate(transposer(True), 1, 32, [x, y], shared_bytes=512).check()
    assert emulate(transposer(False), 1, 32, [x, y], shared_bytes=512).kinds() == {"race"}


def test_blocks_race_in_global_memory():
    def kernel(x):
        st_global_f32(x + u64(cuda.threadIdx.x * 4), np.float32(1))

    assert emulate(kernel, 2, 32, [np.zeros(32, np.float32)]).kinds() == {"race"}
    emulate(kernel, 1, 32, [np.zeros(32, np.float32)]).check()


def test_lanes_part_and_meet_again():
    def collatz(x, steps):
        lane = i32(cuda.threadIdx.x)
        value = i32(ld_global_b32(x + u64(lane * 4)))
        if value == 0:
            return
        count = i32(0)
        while True:
            if value == 1:
                break
            if value % 2 == 0:
                value //= 2
                count += 1
                continue
            value = 3 * value + 1
            count += 1
        total = 0
        for i in range(lane % 5):
            total += i
        st_global_b32(steps + u64(lane * 4), u32(count * 100 + total if lane > 3 else count))

    def count(n):
        steps = 0
        while n != 1:
            n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
        return steps

    x, steps = np.arange(32, dtype=np.uint32), np.full(32, 7, np.uint32)
    emulate(collatz, 1, 32, [x, steps]).check()
    right = [7] + [
        count(n) * (100 if n > 3 else 1) + (sum(range(n % 5)) if n > 3 else 0) for n in range(1, 32)
    ]
    assert steps.tolist() == right


def test_warp_operations():
    def kernel(y):
        lane = i32(cuda.threadIdx.x)
        odd = ballot(u32(lane & 1))
        last = shfl_idx(u32(lane * 3), u32(31))
        st_global_b32(y + u64(lane * 8), odd)
        st_global_b32(y + u64(lane * 8 + 4), last)

    y = np.zeros((32, 2), np.uint32)
    emulate(kernel, 1, 32, [y]).check()
    assert (y[:, 0] == 0xAAAAAAAA).all()
    assert (y[:, 1] == 93).all()


@pytest.mark.parametrize("ordered", [True, False])
def test_named_barriers_order_a_producer_and_a_consumer(ordered):
    def kernel(y):
        smem = cuda.shared.array(0, types.uint8)
        base = shared_address(smem)
        tid = i32(cuda.threadIdx.x)
        if tid < 32:
            st_shared_b32(u32(base + tid * 4), u32(tid * tid))
            bar_arrive(u32(1), u32(64))
        else:
            if ordered:
                bar_sync(u32(1), u32(64))
            st_global_b32(y + u64((tid - 32) * 4), ld_shared_b32(u32(base + (tid - 32) * 4)))

    y = np.zeros(32, np.uint32)
    report = emulate(kernel, 1, 64, [y], shared_bytes=128)
    if ordered:
        report.check()
        assert y.tolist() == [i * i for i in range(32)]
    else:
        assert report.kinds() == {"race", "barrier"}  # and it is left half full


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("ordered", [True, False])
def test_an_arrival_may_not_count_for_an_earlier_opening(ordered, backwards):
    """Whether it did depends on the order of warps; that it may, does not."""

    def kernel(y):
        tid = i32(cuda.threadIdx.x)
        for _ in range(4):
            if tid < 32:
                bar_arrive(u32(1), u32(64))
                if ordered:
                    bar_sync(u32(2), u32(64))  # what came to 1 before has come
            else:
                bar_sync(u32(1), u32(64))
                if ordered:
                    bar_arrive(u32(2), u32(64))

    report = emulate(kernel, 1, 64, [np.zeros(1, np.uint32)], backwards=backwards)
    assert report.ok == ordered
    assert ordered or "race" in report.kinds()


def test_tensors_lie_beyond_32_bits_and_only_their_elements_are_theirs():
    def kernel(x, y, row_bytes):
        lane = i32(cuda.threadIdx.x)
        at = u64(lane >> 3) * u64(row_bytes) + u64(lane & 7) * u64(4)
        st_global_b32(y + u64(lane * 4), ld_global_b32(x + at))

    rows = np.arange(32, dtype=np.uint32).reshape(4, 8)
    y = np.zeros(32, np.uint32)
    far = 1 << 33  # elements
    report = emulate(kernel, 1, 32, [Placed(rows, (far, 1)), y, far * 4]).check()
    assert y.tolist() == list(range(32))
    assert report.tensors["x"].read_bytes == 128
    wide = np.zeros((4, 9), np.uint32)
    assert emulate(kernel, 1, 32, [wide[:, :7], y, 36]).kinds() == {"bounds"}  # the gap
    emulate(kernel, 1, 32, [wide[:, :8], y, 36]).check()
    assert 4 * 3 * far < APART
    assert FIRST_ADDRESS > 1 << 32


def test_atomics_of_all_blocks_take_turns():
    def kernel(counter, found):
        lane = i32(cuda.threadIdx.x)
        old = atom_global_add(counter, u32(lane))
        st_global_b32(found + u64((cuda.blockIdx.x * 32 + lane) * 4), old)

    counter, found = np.full(1, 2**32 - 1, np.uint32), np.zeros(64, np.uint32)
    report = emulate(kernel, 2, 32, [counter, found]).check()
    assert counter[0] == 2 * 496 - 1
    before = np.cumsum([0, *range(32), *range(31)]) - 1
    assert (np.sort(found) == np.sort(before % 2**32)).all()
    assert report.tensors["counter"].read_bytes == report.tensors["counter"].write_bytes == 64 * 4


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("atomic_first", [True, False])
def test_an_atomic_races_with_what_is_none(writes, atomic_first):
    def kernel(counter, found):
        if cuda.threadIdx.x == 0:
            if (cuda.blockIdx.x == 0) == atomic_first:
                atom_global_add(counter, u32(1))
            elif writes:
                st_global_b32(counter, u32(0))
            else:
                st_global_b32(found, ld_global_b32(counter))

    counter, found = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    assert emulate(kernel, 2, 32, [counter, found]).kinds() == {"race"}


def test_warps_that_have_ended_are_not_waited_for():
    def kernel(x):
        tid = i32(cuda.threadIdx.x)
        if tid >= 64:
            return
        st_global_b32(x + u64(tid * 4), u32(tid))
        cuda.syncthreads()  # write-write
        st_global_b32(x + u64((63 - tid) * 4), u32(tid))

    x = np.zeros(64, np.uint32)
    for backwards in (False, True):
        emulate(kernel, 1, 96, [x], backwards=backwards).check()
        assert x.tolist() == list(range(63, -1, -1))


def test_unbalanced_barriers():
    def kernel(x):
        tid = i32(cuda.threadIdx.x)
        cuda.syncthreads()
        if tid < 32:
            cuda.syncthreads()
        else:
            bar_sync(u32(1), u32(64))

    (fault,) = emulate(kernel, 1, 64, [None]).faults
    assert fault.kind == "deadlock"
    where = r"warp 0 at syncthreads, test_emulator.py, line \d+; warp 1 at bar_sync 1, .*, line \d+"
    assert re.fullmatch(where, fault.detail)

    def some_lanes(x):
        if cuda.threadIdx.x >= 40:
            return
        cuda.syncthreads()

    assert emulate(some_lanes, 1, 64, [None]).kinds() == {"divergence"}

    def zero(x):
        bar_sync(u32(0), u32(32))  # syncthreads' own

    assert emulate(zero, 1, 32, [None]).kinds() == {"barrier"}


def test_every_variable_keeps_to_the_lanes_that_assign_it():
    def kernel(y):
        lane = i32(cuda.threadIdx.x)

        def tile(lane):
            if lane < 8:
                return lane, 0
            return 1, lane

        a = b = 1
        c: int = 2
        pair, (d, e) = (3, 4), (5, 6)
        if lane < 4:
            a = b = lane
            c: int = 7 * lane
            pair = (lane, lane + 1)
            (d, e), _ = (lane, 2 * lane), 0
        low, high = tile(lane)
        total = a + 100 * b + c + pair[0] + pair[1] + d + 10 * e + 1000 * low + 10000 * high
        st_global_b32(y + u64(lane * 4), u32(total))

    y = np.zeros(32, np.uint32)
    emulate(kernel, 1, 32, [y]).check()
    for x in range(32):
        mine = (x, x, 7 * x, x, x + 1, x, 2 * x) if x < 4 else (1, 1, 2, 3, 4, 5, 6)
        a, b, c, p, q, d, e = mine
        low, high = (x, 0) if x < 8 else (1, x)
        assert y[x] == a + 100 * b + c + p + q + d + 10 * e + 1000 * low + 10000 * high


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 33}, r"block: \(33, 1, 1\) must be whole warps of 32"),
        ({"block": 16}, "block: .*whole warps"),
        ({"block": 2048}, "at most 1024 threads"),
        ({"grid": 0}, "grid, block: 0 must be"),
        ({"grid": -1}, "grid, block: -1"),
        ({"grid": "3"}, "grid, block: '3'"),
        ({"grid": 1.5}, "grid, block: 1.5"),
        ({"grid": None}, "grid, block: None"),
        ({"grid": (1, 1, 1, 1)}, "grid, block: "),
        ({"grid": (10**6, 10**6)}, "1000000000000 blocks are too many, at most 1048576"),
        ({"shared_bytes": -1}, "shared_bytes: -1 must be 0 to 232448"),
        ({"shared_bytes": 1.5}, "shared_bytes: 1.5"),
        ({"shared_bytes": 1.0}, "shared_bytes: 1.0 must be 0 to 232448"),
        ({"shared_bytes": 10**6}, "shared_bytes: 1000000"),
        ({"registers": 0}, "registers: 0 must be 1 to 255"),
        ({"copies": "soon"}, "copies: 'soon' must be one of early, late"),
        ({"args": []}, "args: missing a required argument: 'x'"),
        ({"args": [1, 2]}, "args: too many positional arguments"),
        ({"args": [np.array([None])]}, "x: an array of object"),
        ({"args": [np.zeros((2, 8))[:, ::2]]}, "x: last axis has stride 2"),
        ({"args": [np.broadcast_to(np.zeros(8), (4, 8))]}, "x: its rows overlap"),
        ({"args": [Placed(np.zeros((4, 8)), (1 << 45, 1))]}, "x: strides .* reach too far"),
        ({"names": ()}, "names: 0 for 1 arguments"),
        ({"kernel": "k"}, "kernel: 'k' must be a function"),
        ({"kernel": eval("lambda x: x")}, "kernel: <lambda> must be a def with its source in a"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_in_one_line(options, message):
    def kernel(x):
        pass

    given = {"kernel": kernel, "grid": 1, "block": 32, "args": [None]} | options
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        emulate(**given)
    assert "\n" not in str(caught.value)


def test_what_is_written_must_be_writeable():
    def kernel(x):
        st_global_b32(x + u64(cuda.threadIdx.x * 4), u32(7))

    x = np.zeros(32, np.uint32)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="x: the kernel wrote to a read-only array"):
        emulate(kernel, 1, 32, [x])
    whole = np.zeros((4, 16), np.uint32)
    emulate(kernel, 1, 32, [whole[::-1, :8]], names=("rows",))  # rows upwards: their own only
    for array in (np.zeros(32, np.int8), np.zeros((), np.float32), np.zeros(0, np.float32)):
        assert emulate(kernel, 1, 32, [array]).kinds() == {"bounds"}


def test_what_is_not_emulated_is_said_in_one_line():
    def indexes(x):
        x[0] = 1

    def asks_numba(x):
        st_global_b32(x, u32(cuda.grid(1)))

    def declares(x):
        cuda.shared.array(16, types.float32)

    def has_else(x):
        for _ in range(2):
            pass
        else:
            st_global_b32(x, u32(1))

    def tries(x):
        try:
            cuda.syncthreads()
        finally:
            pass

    def runs_out(x):
        cuda.local.array(4, types.float32)[cuda.threadIdx.x] = np.float32(1)

    def spins(x):
        while ld_global_b32(x) == 0:
            pass

    def forgets(x):
        if cuda.blockIdx.x > 0:
            y = 1
        st_global_b32(x, y)

    for kernel, message in (
        (indexes, "a tensor is an address in this kernel"),
        (asks_numba, "cuda.grid is not emulated"),
        (declares, "only dynamic shared memory"),
        (has_else, r"line \d+ of .*has_else: a loop's else not emulated"),
        (tries, r"line \d+ of .*tries: Try not emulated"),
        (runs_out, r"local array: index 4 is outside \(4,\)"),
        (forgets, "a variable that has not been assigned"),
        (spins, "a loop turned 200 times"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flow, "ENDLESS", 200)
            with pytest.raises((TypeError, IndexError, RuntimeError, NameError), match=message):
                emulate(kernel, 1, 32, [np.zeros(32, np.uint32)])


def test_an_error_in_the_kernel_is_raised_with_its_line():
    def kernel(x):
        st_global_f32(x, np.float32(1) + undefined_name)  # noqa: F821

    with pytest.raises(NameError, match="undefined_name"):
        emulate(kernel, 1, 32, [np.zeros(1, np.float32)])


def test_the_example_shows_a_right_a_slow_and_a_wrong_kernel(capsys):
    path = Path(__file__).parent.parent / "examples" / "emulate_kernel.py"
    runpy.run_path(str(path))["main"]()
    right, slow, wrong = capsys.readouterr().out.split("== ")[1:]
    assert right.startswith("right: right values")
    assert "0 of them from bank conflicts" in right
    assert slow.startswith("without a swizzle: right values")
    assert "8 of them from bank conflicts" in slow
    assert wrong.startswith("without the wait: wrong values")
    assert "in flight" in wrong


@pytest.mark.parametrize(
    "module",
    [
        boxes,
        emulated,
        memory,
        mma_layout,
        ptx,
        sm90_layout,
        sm90_schedule,
        tensor_core,
        tensor_maps,
    ],
)
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(module).attempted > 0


def test_the_package_offers_emulate():
    assert kernels.emulate is emulate
