"""What a launch is given: tensor maps, calls that are remembered, problems that are refused.

Needs no GPU, driver or torch: what is asked of them is answered here.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from kernels import (
    driver,
    flash_attention,
    mma_layout,
    repeats,
    sm90_layout,
    tensor_maps,
    tensors,
)
from kernels.plans import Plan, chosen, plan, refusal
from kernels.problem import DTYPES, NO_WINDOW, Problem
from kernels.tensor_maps import MAP_ALIGNMENT, MAP_BYTES, encoder, with_maps

# ---- tensor maps ---------------------------------------------------------------------------------

PTX = """
.visible .entry kernel(
    .param .u64 kernel_param_0,
    .param .u64 kernel_param_1,
    .param .b64 kernel_param_10
)
{
    ld.param.u64 \t%rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    ld.param.b64 %rd3, [kernel_param_10];
}
"""


def test_the_first_parameters_become_maps_and_the_others_stay():
    text = with_maps(PTX, "kernel", 2)
    for i, register in ((0, "%rd1"), (1, "%rd2")):
        name = f"kernel_param_{i}"
        assert f".param .align 64 .b8 {name}[128]" in text
        assert f"mov.b64 {register}, {name}; cvta.param.u64 {register}, {register};" in text
        assert f"[{name}]" not in text
    assert ".param .b64 kernel_param_10" in text
    assert "ld.param.b64 %rd3, [kernel_param_10];" in text
    assert with_maps(PTX, "kernel", 0) == PTX


@pytest.mark.parametrize(
    ("ptx", "i"),
    [
        (PTX.replace(".u64 kernel_param_1,", ".u32 kernel_param_1,"), 1),
        (PTX.replace("ld.param.b64 %rd2,", "ld.param.u32 %r2,"), 1),
        (PTX, 2),  # there is none
        ("", 0),
    ],
)
def test_parameters_that_are_no_addresses_are_refused(ptx, i):
    with pytest.raises(ValueError, match=f"ptx: parameter {i} of kernel is not a 64-bit number"):
        with_maps(ptx, "kernel", 3)


@pytest.fixture
def encoded(monkeypatch):
    """What the driver was asked to encode; its map is the bytes 0, 1, 2, ..."""
    asked = []

    def encode(at, element, axes, address, dims, steps, box, every, *how) -> int:
        assert at % MAP_ALIGNMENT == 0
        ctypes.memmove(at, bytes(range(MAP_BYTES)), MAP_BYTES)
        asked.append((element, axes, address, [*dims], [*steps], [*box], [*every], how))
        return 0

    library = SimpleNamespace(cuTensorMapEncodeTiled=encode)
    monkeypatch.setattr(tensor_maps, "direct", lambda: library)
    return asked


@pytest.mark.parametrize(("dtype", "element"), [("float16", 6), ("bfloat16", 9)])
def test_a_map_is_told_sizes_from_the_inside_and_strides_in_bytes(dtype, element, encoded):
    encode = encoder((2, 3, 50, 72), (12000, 4000, 80), dtype, 64)
    assert not encoded
    assert encode(4096) == encode(8192) == bytes(range(MAP_BYTES))
    first, second = encoded
    assert first[:3] == (element, 4, 4096)
    assert second[2] == 8192
    assert first[3:7] == ([72, 50, 3, 2], [160, 8000, 24000], [64, 64, 1, 1], [1, 1, 1, 1])
    assert first[7] == (0, 3, 2, 0)  # not interleaved, 128-byte swizzle, 128-byte lines, zeros


def test_strides_of_a_single_head_are_not_zero(encoded):
    encoder((1, 1, 50, 64), (0, 0, 64), "float16", 64)(4096)
    assert encoded[0][4] == [128, 16, 16]


def test_the_drivers_refusal_is_an_error(monkeypatch):
    library = SimpleNamespace(cuTensorMapEncodeTiled=lambda *_: 1)

    def check(result) -> None:
        raise RuntimeError(f"CUDA driver: {result}")

    monkeypatch.setattr(tensor_maps, "direct", lambda: library)
    monkeypatch.setattr(tensor_maps, "check", check)
    with pytest.raises(RuntimeError, match=r"CUDA driver: \(1,\)"):
        encoder((1, 1, 50, 64), (0, 0, 64), "float16", 64)(4096)


# ---- calls like an earlier one -------------------------------------------------------------------


@dataclass
class FakeTensor:
    """As much of `torch.Tensor` as is looked at."""

    shape: tuple[int, ...] = (1, 5, 8)
    strides: tuple[int, ...] = (40, 8, 1)
    dtype: str = "float16"
    device: str = "cuda:0"
    address: int = 4096
    layout: str = "strided"
    requires_grad: bool = False
    negative: bool = False

    def stride(self):
        return self.strides

    def data_ptr(self):
        if self.layout != "strided":
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self.address

    def is_neg(self):
        return self.negative


class Subclass(FakeTensor):
    pass


class Text(str):
    """Equal to its text, and of another type."""


@pytest.fixture
def torch(monkeypatch):
    made = iter(range(1 << 20, 1 << 21, 4096))

    def empty(shape, *, dtype, device):
        return FakeTensor(tuple(shape), dtype=dtype, device=device, address=next(made))

    module = SimpleNamespace(
        Tensor=FakeTensor, float32="float32", empty=empty,
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 77),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(repeats, "_known", {})
    return module


def key_of(q=None, k=None, v=None, out=None, **options):
    return seen(q, k, v, out, **options)[0]


def seen(
    q=None, k=None, v=None, out=None, *, is_causal=False, return_lse=False, variant=None,
    softcap=0.0, scale=None, window=NO_WINDOW,
):  # fmt: skip
    """The key and the addresses of a call of plain tensors, but for those given."""
    q, k, v = (FakeTensor(address=4096 * i) if x is None else x for i, x in enumerate((q, k, v), 1))
    return repeats.key(q, k, v, out, is_causal, return_lse, variant, softcap, scale, window)


def test_the_same_call_has_the_same_key_wherever_its_tensors_lie(torch):
    assert key_of() == key_of()
    assert key_of(FakeTensor(address=1 << 40)) == key_of()
    assert key_of(scale=0.5, window=(3, 4)) == key_of(scale=0.5, window=(3, 4))
    assert key_of(window=(-1, int("-1")), softcap=0) == key_of()
    assert key_of(out=FakeTensor()) == key_of(out=FakeTensor(address=1 << 40))


def test_the_addresses_come_with_the_key(torch):
    assert seen()[1] == (4096, 8192, 12288, 0)
    assert seen(FakeTensor(address=80), out=FakeTensor(address=96))[1] == (80, 8192, 12288, 96)


TENSORS = ["q", "k", "v", "out"]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(
    "other",
    [{"shape": (1, 4, 8)}, {"shape": (5, 8)}, {"strides": (80, 16, 1)}, {"strides": (40, 9, 1)},
     *({"address": 4096 + at} for at in (1, 2, 4, 8))],
    ids=str,
)  # fmt: skip
def test_what_a_plan_depends_on_makes_another_key(other, name, torch):
    usual = {"out": FakeTensor()}
    assert key_of(**usual | {name: FakeTensor(**other)}) not in (key_of(**usual), key_of(), None)


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"device": "cuda:1"}], ids=str)
def test_a_dtype_or_device_is_all_tensors_or_the_call_is_not_remembered(other, torch):
    usual = dict.fromkeys(TENSORS, FakeTensor())
    changed = dict.fromkeys(TENSORS, FakeTensor(**other))
    assert key_of(**changed) not in (key_of(**usual), None)
    for name in TENSORS:
        assert key_of(**usual | {name: FakeTensor(**other)}) is None


def test_tensors_do_not_change_places_in_a_key(torch):
    tensors = [FakeTensor(shape=(1, n, 8), strides=(8 * n, 8, 1)) for n in (3, 4, 5, 6)]
    assert len({key_of(*order) for order in itertools.permutations(tensors)}) == 24
    # Sizes and strides do not either.
    assert key_of(FakeTensor((3, 4), (5, 6))) != key_of(FakeTensor((5, 6), (3, 4)))


def test_one_tensor_that_is_not_aligned_is_as_bad_as_another(torch):
    odd = FakeTensor(address=4096 + 8)
    keys = {key_of(**{"out": FakeTensor()} | {name: odd}) for name in TENSORS}
    assert len(keys | {key_of(odd, odd, odd, odd)}) == 1
    assert len({key_of(FakeTensor(address=4096 + at)) for at in (0, 1, 2, 4, 8)}) == 5


def test_options_differ_by_value(torch):
    keys = [
        key_of(), key_of(is_causal=True), key_of(return_lse=True), key_of(variant="mma"),
        key_of(variant="sm90"), key_of(softcap=1.0), key_of(scale=0.5), key_of(scale=0.25),
        key_of(window=(-1, 5)), key_of(window=(5, -1)), key_of(out=FakeTensor()),
    ]  # fmt: skip
    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "options",
    [*({flag: x} for flag in ("is_causal", "return_lse")
       for x in (0, 1, 1.0, None, np.True_, [], "yes")),
     *({"softcap": x} for x in (False, None, "0", np.float64(0), [0])),
     *({"variant": x} for x in (0, Text("mma"), ["mma"], np.array(["mma"]))),
     *({"scale": x} for x in (1, True, np.float32(1), np.float64(1), "1", [1.0])),
     *({"window": x} for x in ([-1, -1], (1.0, 2), (True, 2), (2, False), ("1", 2), (1,), (1, 2, 3),
                               (1, np.int64(2)), (), np.array([1, 2]), 3, None))],
    ids=str,
)  # fmt: skip
def test_options_of_other_types_are_looked_at_each_time(options, torch):
    assert seen(**options) == (None, ())


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(
    "tensor",
    [FakeTensor(requires_grad=True), FakeTensor(negative=True), FakeTensor(layout="sparse"),
     Subclass(), np.zeros((1, 5, 8), np.float16), [0.0]],
    ids=["requires grad", "negative", "sparse", "subclass", "numpy", "list"],
)  # fmt: skip
def test_only_plain_tensors_are_remembered(tensor, name, torch):
    assert key_of(**{name: FakeTensor()}) is not None
    assert seen(**{name: tensor}) == (None, ())


def test_without_torch_nothing_is_remembered(torch, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    assert key_of() is None


def test_a_call_is_found_by_its_key(torch):
    repeats._known[key_of()] = "a call"
    assert repeats.find(key_of()) == "a call"
    assert repeats.find(key_of(scale=0.5)) is None
    assert repeats.find(None) is None


class Launches(list):
    """A kernel's."""

    def arguments(self, packed):
        return packed

    def launch(self, grid, stream, arguments):
        self.append((grid, stream, arguments))


def remembered(monkeypatch, statistics=("L",), grid=3, key="key"):
    """The call of four tensors of 5 rows of 8, 80 bytes each, and its launches."""
    problem = Problem.of(*[(1, 5, 8)] * 3, "float16")
    plan = Plan(problem, None, 0, grid, statistics, tuple)
    launches = Launches()
    views = [
        tensors.Tensor(name, "torch", 4096, (1, 5, 8), (40, 8, 1), "float16", 2, 0, None)
        for name in ("q", "k", "v", "out")
    ]
    monkeypatch.setattr(driver, "is_current", lambda device: True)
    repeats.remember(key, plan, launches, views)
    return repeats.find(key), launches


INPUTS = [FakeTensor(address=4096 * i) for i in (1, 2, 3)]


def launched(repeat, out=None):
    """What ``repeat`` returns for the inputs and ``out``."""
    return repeat.launch(INPUTS[0], out, seen(*INPUTS, out)[1])


@pytest.mark.parametrize("statistics", [(), ("L",)])
def test_a_repeat_launches_with_todays_addresses(statistics, torch, monkeypatch):
    repeat, launches = remembered(monkeypatch, statistics)
    answer = launched(repeat)
    out, *lse = answer if statistics else (answer,)
    assert out.shape == (1, 5, 8)
    assert [x.shape for x in lse] == [(1, 5)] * len(statistics)
    addresses = (4096, 8192, 12288, out.address, *(x.address for x in lse))
    assert launches == [(3, 77, addresses)]
    given = FakeTensor(address=1 << 30)
    answer = launched(repeat, given)
    assert (answer[0] if statistics else answer) is given
    assert launches[1][2][3] == 1 << 30


@pytest.mark.parametrize(
    ("at", "overlaps"),
    [(4096, True), (4096 + 79, True), (4096 - 79, True), (8192 + 16, True), (12288 - 16, True),
     (4096 + 80, False), (4096 - 80, False), (12288 + 80, False)],
)  # fmt: skip
def test_out_over_an_input_is_looked_at_again(at, overlaps, torch, monkeypatch):
    repeat, launches = remembered(monkeypatch, ())
    for _ in range(2):
        assert (launched(repeat, FakeTensor(address=at)) is None) is overlaps
    assert len(launches) == (0 if overlaps else 2)


@pytest.mark.parametrize("null", range(4))
def test_memory_that_was_given_back_is_looked_at_again(null, torch, monkeypatch):
    repeat, launches = remembered(monkeypatch, ())
    addresses = [4096, 8192, 12288, 1 << 30]
    addresses[null] = 0
    assert repeat.launch(INPUTS[0], FakeTensor(address=addresses[3]), tuple(addresses)) is None
    assert not launches
    empty = [(0, 0) if i == null else span for i, span in enumerate(repeat.spans)]
    repeat = replace(repeat, spans=tuple(empty))
    assert repeat.launch(INPUTS[0], FakeTensor(address=addresses[3]), tuple(addresses)) is not None
    assert launches == [(3, 77, tuple(addresses))]


@pytest.mark.parametrize("is_current", [True, False])
def test_a_repeat_is_launched_in_its_devices_context(is_current, torch, monkeypatch):
    repeat, launches = remembered(monkeypatch, ())
    happened = []

    @contextlib.contextmanager
    def on_device(device):
        happened.append(f"enter {device} after {len(launches)}")
        yield
        happened.append(f"leave after {len(launches)}")

    monkeypatch.setattr(driver, "is_current", lambda device: is_current)
    monkeypatch.setattr(driver, "on_device", on_device)
    launched(repeat)
    assert len(launches) == 1
    assert happened == ([] if is_current else ["enter 0 after 0", "leave after 1"])


def test_the_current_context_is_the_devices_or_not(monkeypatch):
    current = 0x1234

    def get(at) -> int:
        ctypes.c_void_p.from_address(at).value = current
        return 0

    monkeypatch.setattr(driver, "direct", lambda: SimpleNamespace(cuCtxGetCurrent=get))
    monkeypatch.setattr(driver, "_address", lambda device: 0x1234 + device)
    assert driver.is_current(0)
    assert not driver.is_current(1)
    current = 0  # none
    assert not driver.is_current(0)


def test_flash_attention_repeats_a_call_that_differs_in_nothing_but_its_memory(torch, monkeypatch):
    out = FakeTensor(address=1 << 20)
    _, launches = remembered(monkeypatch, (), key=key_of(*INPUTS, out))
    assert flash_attention(*INPUTS, out=out) is out
    moved = replace(out, address=1 << 21)
    assert flash_attention(*INPUTS, out=moved) is moved
    assert [addresses[3] for _, _, addresses in launches] == [1 << 20, 1 << 21]
    for other in (
        {"stream": 0}, {"block_q": 16}, {"block_k": 16}, {"is_causal": True}, {"out": None},
        {"scale": 0.5}, {"out": Subclass()}, {"out": INPUTS[1]}, {"out": FakeTensor(address=0)},
    ):  # fmt: skip
        with pytest.raises(TypeError, match="q: FakeTensor is not taken"):  # a new call
            flash_attention(*INPUTS, **{"out": out} | other)
    assert len(launches) == 2


def test_what_is_not_remembered(torch, monkeypatch):
    assert remembered(monkeypatch, ("m", "l"))[0] is None  # more than the caller's memory
    assert remembered(monkeypatch, grid=0)[0] is None  # nothing was launched


def test_what_is_remembered_is_bounded(torch, monkeypatch):
    monkeypatch.setattr(repeats, "MOST", 2)
    monkeypatch.setattr(repeats, "MOST_READY", 2)
    repeat, launches = remembered(monkeypatch)
    for i in range(5):
        launched(repeat, FakeTensor(address=(1 << 30) + 4096 * i))
        assert len(repeat.ready) <= 2
    for i in range(5):
        repeats.remember(i, repeat.plan, launches, ())
        assert len(repeats._known) <= 2


# ---- what the Hopper kernel refuses --------------------------------------------------------------


def refused(*, capability=(9, 0), dtype="float16", shape=(2, 3, 5, 16), rows=5, **of_k) -> str:
    """Why sm90 refuses q, k, v and out of this shape; ``of_k`` is what is odd about k."""
    keys = (*shape[:-2], rows, shape[-1])
    problem = Problem.of(shape, keys, keys, dtype)
    size = DTYPES[dtype]
    views = []
    for name, x in (("q", shape), ("k", keys), ("v", keys), ("out", shape)):
        strides = tuple(int(np.prod(x[i + 1 :])) for i in range(4))
        view = tensors.Tensor(name, "torch", 4096, x, strides, dtype, size, 0, None)
        views.append(replace(view, **of_k) if name == "k" else view)
    return refusal("sm90", problem, views, capability)


def test_what_sm90_takes():
    assert refused() == refused(dtype="bfloat16") == ""
    assert refused(strides=(0, 16, 48, 1), shape=(1, 3, 5, 16)) == ""  # of a single batch: unused
    assert refused(strides=(0, 0, 16, 1), shape=(1, 1, 5, 16)) == ""


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"capability": (8, 9)}, "compute capability 9.0, the device has 8.9"),
        ({"capability": (10, 0)}, "compute capability 9.0, the device has 10.0"),
        ({"capability": (12, 0)}, "compute capability 9.0, the device has 12.0"),
        ({"dtype": "float32"}, "dtype float32 must be one of float16, bfloat16"),
        ({"shape": (2, 3, 5, 12)}, "widths 12 and 12 must be multiples of 8"),
        ({"rows": 0}, "there are no keys"),
        ({"pointer": 4096 + 8}, "every row of k must begin at a multiple of 16 bytes"),
        ({"strides": (252, 84, 20, 1)}, "every row of k must begin at a multiple of 16 bytes"),
        ({"strides": (240, 80, 0, 1)}, "strides of k must be positive and below 2**40 bytes"),
        ({"strides": (240, 80, -16, 1)}, "strides of k must be positive"),
        ({"strides": (240, 0, 16, 1)}, "strides of k must be positive"),  # expanded heads
        ({"strides": (-240, 80, 16, 1)}, "strides of k must be positive"),
        ({"strides": (2**39, 80, 16, 1)}, "strides of k must be positive"),
    ],
    ids=str,
)
def test_what_sm90_refuses(odd, reason):
    assert reason in refused(**odd)


@pytest.mark.parametrize(
    ("capability", "strides", "variant"),
    [
        ((9, 0), (240, 80, 16, 1), "sm90"),
        ((9, 0), (240, 80, 0, 1), "mma"),
        ((10, 0), (240, 80, 16, 1), "mma"),
        ((8, 0), (240, 80, 16, 1), "mma"),
        ((7, 5), (240, 80, 16, 1), "q_outer"),
        ((9, 0), (252, 84, 20, 1), "q_outer"),
    ],
)
def test_what_is_refused_goes_to_the_next_kernel(capability, strides, variant):
    shape = (2, 3, 5, 16)
    problem = Problem.of(shape, shape, shape, "float16")
    view = tensors.Tensor("k", "torch", 4096, shape, strides, "float16", 2, 0, None)
    assert chosen(problem, [view], capability) == variant


MMA, SM90 = mma_layout.layout_for(64, 64), sm90_layout.layout_for(64, 64, n=64, s=64)


@pytest.mark.parametrize(
    ("variant", "layout", "error", "message"),
    [
        ("q_outer", MMA, ValueError, "layout: is for sm90 and mma, not 'q_outer'"),
        ("mma", SM90, TypeError, "layout: Sm90Layout.* must be MmaLayout for 'mma'"),
        ("sm90", MMA, TypeError, "layout: MmaLayout.* must be Sm90Layout for 'sm90'"),
        (None, MMA, TypeError, "layout: MmaLayout.* must be Sm90Layout for 'sm90'"),
        ("sm90", 3, TypeError, "layout: 3 must be Sm90Layout"),
        ("mma", replace(MMA, d=48), ValueError, "layout: widths 48 and 64 must be at least the"),
        ("sm90", replace(SM90, e=48), ValueError, "layout: widths 64 and 48 must be at least the"),
        ("mma", replace(MMA, itemsize=4), ValueError, "layout: itemsize 4 must be 2 for float16"),
    ],
    ids=str,
)
def test_a_layout_must_be_the_problems(variant, layout, error, message, monkeypatch):
    monkeypatch.setattr(driver, "limits", lambda device: driver.Limits(0, 0, 0, (9, 0)))
    shape = (2, 3, 5, 64)
    problem = Problem.of(shape, shape, shape, "float16")
    view = tensors.Tensor("q", "torch", 4096, shape, (960, 320, 64, 1), "float16", 2, 0, None)
    with pytest.raises(error, match=message):
        plan(problem, [view] * 4, return_lse=False, variant=variant, layout=layout)
