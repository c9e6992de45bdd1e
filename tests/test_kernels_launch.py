"""Validation, tile choice and imports of ``kernels``: what can be wrong before a launch.

Needs no GPU, and numba only where a test says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import struct
import subprocess
import sys
import tomllib
import types
from itertools import pairwise
from pathlib import Path

import kernels_gpu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kernels
from kernels import layout, problem, tensors
from kernels.dlpack import _DLTensor
from kernels.layout import Layout, buffers, choose
from kernels.problem import MAX_WIDTH, VARIANTS, Problem

ROOT = Path(__file__).parent.parent
needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="needs numba-cuda (extra: test)"
)
H200 = {"shared_per_block": 232448, "shared_per_sm": 233472}
OLD = {"shared_per_block": 49152, "shared_per_sm": 65536}


def zeros(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


Q, K, V = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 6)
FROZEN = zeros(2, 4, 5, 6)
FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": Q.astype(np.float64)}, TypeError, r"q: dtype float64 .* float16, bfloat16, float32"),
        ({"q": Q.astype(np.complex64)}, TypeError, "q: dtype complex64"),
        ({"q": Q.astype(np.int32)}, TypeError, "q: dtype int32"),
        ({"k": K.astype(np.float16)}, TypeError, "k: dtype float16 must be q's, float32"),
        ({"v": V.astype(np.int8)}, TypeError, "v: dtype int8 must be q's, float32"),
        ({"q": Q.tolist()}, TypeError, "q: list is not taken"),
        ({"k": np.ma.masked_array(K)}, TypeError, "k: MaskedArray is not taken"),
        ({"v": None}, TypeError, "v: NoneType is not taken"),
        ({"q": np.float32(1)}, TypeError, "q: float32 is not taken"),
        ({"q": zeros(8)}, ValueError, r"q: shape \(8,\) needs at least \(rows, width\)"),
        ({"q": zeros(4, 5, 8)}, ValueError, "k: shape .* as many dimensions as q"),
        ({"q": zeros(2, 4, 5, 0)}, ValueError, "q: width 0 must be 1 to 256"),
        ({"v": zeros(2, 2, 7, 0)}, ValueError, "v: width 0 must be 1 to 256"),
        ({"v": zeros(2, 2, 7, 257)}, ValueError, "v: width 257 must be 1 to 256"),
        ({"k": zeros(2, 2, 7, 9)}, ValueError, "k: width 9 must match q's width 8"),
        ({"v": zeros(2, 2, 6, 6)}, ValueError, "v: shape .* match k's"),
        ({"v": zeros(2, 1, 7, 6)}, ValueError, "v: shape .* match k's"),
        ({"k": zeros(3, 2, 7, 8)}, ValueError, r"k: leading dimensions \(3,\) must be q's, \(2,\)"),
        (
            {"k": zeros(2, 3, 7, 8), "v": zeros(2, 3, 7, 6)},
            ValueError,
            "k: 3 heads must divide q's 4 heads",
        ),
        (
            {"k": zeros(2, 0, 7, 8), "v": zeros(2, 0, 7, 6)},
            ValueError,
            "k: 0 heads must divide q's 4 heads",
        ),
        ({"window_size": (-2, 0)}, ValueError, r"window_size: \(-2, 0\) must not go below -1"),
        ({"window_size": (0, -5)}, ValueError, r"window_size: \(0, -5\) must not go below -1"),
        ({"window_size": 3}, ValueError, r"window_size: 3 must be \(left, right\)"),
        ({"window_size": (1, 2, 3)}, ValueError, "window_size: .* must be"),
        ({"window_size": {1, 2}}, ValueError, r"window_size: \{1, 2\} must be \(left, right\)"),
        ({"window_size": "12"}, ValueError, r"window_size: '12' must be \(left, right\)"),
        ({"window_size": (-(10**5000), 0)}, ValueError, "window_size: a number of more than 4300"),
        ({"window_size": (1.5, 2)}, TypeError, "window_size: 1.5 must be a whole number"),
        ({"scale": np.inf}, ValueError, "scale: inf must be finite"),
        ({"scale": float("nan")}, ValueError, "scale: nan must be finite"),
        ({"scale": 1e300}, ValueError, r"scale: 1e\+300 must be finite in float32"),
        ({"scale": -2.36e38}, ValueError, r"-2.36e\+38 must .* so must log2\(e\) times it"),
        ({"scale": "big"}, TypeError, "scale: 'big' must be a number"),
        ({"scale": "0.5"}, TypeError, "scale: '0.5' must be a number"),
        ({"scale": b"1"}, TypeError, "scale: b'1' must be a number"),
        ({"scale": True}, TypeError, "scale: True must be a number"),
        ({"scale": 1j}, TypeError, "scale: 1j must be a number"),
        ({"scale": np.ones(1)}, TypeError, "scale: .* must be a number"),
        ({"scale": 10**400}, ValueError, "scale: 1000.* must be finite in float32"),
        ({"scale": 10**5000}, ValueError, "scale: a number of more than 4300 digits must be fin"),
        ({"is_causal": 1}, TypeError, "is_causal: 1 must be True or False"),
        ({"softcap": 5.0}, NotImplementedError, "softcap: 5.0 must be 0"),
        ({"softcap": "0"}, TypeError, "softcap: '0' must be a number"),
        ({"softcap": False}, TypeError, "softcap: False must be a number"),
        ({"softcap": np.zeros(2)}, TypeError, "softcap: .* must be a number"),
        ({"softcap": np.nan}, NotImplementedError, "softcap: nan must be 0"),
        ({"return_lse": 1}, TypeError, "return_lse: 1 must be True or False"),
        ({"return_lse": "no"}, TypeError, "return_lse: 'no' must be True or False"),
        ({"variant": np.array(["q_outer"])}, TypeError, "variant: array.* must be one of"),
        ({"stream": -1}, ValueError, r"stream: handle -1 must be 0 to 2\*\*64 - 1"),
        ({"stream": 2**64}, ValueError, "stream: handle 18446744073709551616 must be"),
        ({"stream": True}, TypeError, "stream: True must be None, an integer handle"),
        ({"stream": "fast"}, TypeError, "stream: 'fast' must be None, an integer handle"),
        ({"stream": types.SimpleNamespace}, TypeError, "stream: .* must be None, an integer"),
        ({"q": np.ndarray}, TypeError, "q: the class ndarray is not taken"),
        ({"variant": "two_pass"}, ValueError, "variant: 'two_pass' must be one of q_outer, kv_"),
        ({"block_q": 0}, ValueError, "block_q: 0 must be at least 1"),
        ({"block_q": 10**5000}, ValueError, "block_q: a number of more than 4300 digits must be"),
        ({"block_k": -3}, ValueError, "block_k: -3 must be at least 1"),
        ({"block_k": 2.5}, TypeError, "block_k: 2.5 must be a whole number"),
        ({"out": zeros(2, 4, 5, 8)}, ValueError, r"out: shape .* must be \(2, 4, 5, 6\)"),
        ({"out": zeros(2, 4, 5, 6, dtype=np.float16)}, TypeError, "out: dtype float16 must be q's"),
        (
            {"out": zeros(2, 4, 5, 6, dtype="f4, f2")["f0"]},
            ValueError,
            r"out: strides \(.*6\) must be multiples of its 4 bytes",
        ),
        (
            {"out": zeros(2, 4, 6, 5).swapaxes(-1, -2)},
            ValueError,
            "out: last axis has stride 5, it must be contiguous",
        ),
        ({"out": FROZEN}, ValueError, "out: array is read-only"),
        (
            {"out": np.lib.stride_tricks.as_strided(zeros(9), (2, 4, 5, 6), (0, 0, 0, 4))},
            ValueError,
            "out: strides .* put two elements in one place",
        ),
    ],
)  # fmt: skip
def test_wrong_input_is_one_clear_error(arguments, error, message) -> None:
    given_arguments = {"q": Q, "k": K, "v": V} | arguments
    with pytest.raises(error, match=message) as caught:
        kernels.flash_attention(**given_arguments)
    assert "\n" not in str(caught.value)
    assert not any(x.any() for x in (Q, K, V, FROZEN))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_must_not_overlap_the_inputs(name) -> None:
    memory = np.ones(3 * 40, np.float32)
    qkv = {x: zeros(5, 8) for x in "qkv"} | {name: memory[40:80].reshape(5, 8)}
    with pytest.raises(ValueError, match=f"out: its memory range overlaps {name}'s"):
        kernels.flash_attention(**qkv, out=memory[79:119].reshape(5, 8))
    assert (memory == 1).all()


class Stub(types.ModuleType):
    """As much of torch as validation looks at."""

    strided = "strided"

    class Tensor:
        def __init__(self, shape, *, device="cpu", requires_grad=False, dtype="torch.float32"):
            self.shape, self.dtype, self.requires_grad = shape, dtype, requires_grad
            self.device = types.SimpleNamespace(type=device, index=0)
            self.layout = "strided"

    Tensor.__module__ = "torch"

    @staticmethod
    def is_grad_enabled() -> bool:
        return True


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({}, "k: is on device .*cpu.*; torch tensors must be on a CUDA device"),
        ({"device": "cuda", "requires_grad": True}, "k: requires a gradient"),
    ],
)
def test_torch_tensors_that_are_not_taken(tensor, message, monkeypatch) -> None:
    torch = Stub("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ValueError, match=message):
        tensors.view("k", torch.Tensor((3, 4), **tensor))


def test_streams_are_understood() -> None:
    q = tensors.view("q", zeros(2, 3))
    protocol = types.SimpleNamespace(__cuda_stream__=lambda: (0, 77))
    attribute = types.SimpleNamespace(__cuda_stream__=(0, 78))
    torch_like, cupy_like = types.SimpleNamespace(cuda_stream=79), types.SimpleNamespace(ptr=80)
    numba_like = types.SimpleNamespace(handle=types.SimpleNamespace(value=None))
    streams = (5, np.int64(6), protocol, attribute, torch_like, cupy_like, numba_like)
    assert [tensors.stream_of(q, s) for s in streams] == [5, 6, 77, 78, 79, 80, 0]
    assert tensors.stream_of(q, 2**64 - 1) == 2**64 - 1

    def failing():
        raise RuntimeError("lost\nits device")

    for broken, reason in (
        (failing, "RuntimeError: lost its device"), (7, "TypeError"), (lambda: (0,), "ValueError"),
        ((0, "x"), "TypeError"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"stream: __cuda_stream__ of .*{reason}") as caught:
            tensors.stream_of(q, types.SimpleNamespace(__cuda_stream__=broken))
        assert "\n" not in str(caught.value)
    for wrong in ("fast", True, 1.5):
        with pytest.raises(TypeError, match=r"stream: .* must be None, an integer handle"):
            tensors.stream_of(q, wrong)


class CudaArray:
    """Device memory, described by its interface alone."""

    def __init__(
        self, shape, strides=None, typestr="<f4", address=None, readonly=False, **rest
    ) -> None:
        if address is None:
            address = 0 if 0 in shape else 1 << 20
        self.__cuda_array_interface__ = {
            "shape": shape, "strides": strides, "typestr": typestr, "data": (address, readonly),
            **rest,
        }  # fmt: skip


class Managed(ctypes.Structure):
    """As much of a DLManagedTensor as is read."""

    _fields_ = (("tensor", _DLTensor),)


class Packed:
    """Device memory, described by DLPack alone. ``lies`` are fields that it gets wrong."""

    def __init__(self, shape, device=0, capsule=b"dltensor", error=None, **lies) -> None:
        self.shape, self.device, self.capsule, self.error = shape, device, capsule, error
        fields = {"data": 1 << 20, "code": 2, "bits": 32, "lanes": 1, "ndim": len(shape)}
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        self.managed = Managed()
        self.streams = []
        for name, value in (fields | lies).items():
            setattr(self.managed.tensor, name, value)
        self.managed.tensor.device_id = device
        self.managed.tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self, *, stream):
        self.streams.append(stream)
        if self.error:
            raise self.error
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
        return new(ctypes.addressof(self.managed), self.capsule, None)


@pytest.fixture
def fake_gpu(monkeypatch) -> types.SimpleNamespace:
    """Two devices that never run anything: what would be waited for and launched, and where."""
    pytest.importorskip("numba_cuda")
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        pytest.skip("the simulator has no device memory")
    from kernels import compiled, driver

    seen = types.SimpleNamespace(waits=[], launches=[], loads=[], contexts=[])
    limits = driver.Limits(232448, 233472, 65536, (9, 0))

    class Loaded:
        registers = 1

        def arguments(self, packed):
            return packed

        def launch(self, grid, stream, arguments) -> None:
            seen.launches.append((grid, stream, arguments))

    def load(*wanted):
        seen.loads.append(wanted)
        return compiled.Built(Loaded(), 0.0, False)

    def on_device(device):
        seen.contexts.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(driver, "limits", lambda device: limits)
    monkeypatch.setattr(driver, "device_of", lambda address: address >> 30)
    monkeypatch.setattr(driver, "wait_for", lambda *what: seen.waits.append(what))
    monkeypatch.setattr(compiled, "load", load)
    monkeypatch.setattr(driver, "is_current", lambda device: False)
    monkeypatch.setattr(driver, "on_device", on_device)
    monkeypatch.setattr(tensors, "empty", lambda like, shape, dtype, stream: CudaArray(shape))
    return seen


def test_device_arrays_by_their_interface(fake_gpu) -> None:
    x = tensors.view("q", CudaArray((2, 0, 8)))
    assert (x.container, x.shape, x.dtype, x.strides) == ("other", (2, 0, 8), "float32", (0, 8, 1))
    with pytest.raises(TypeError, match="q: masked arrays are not taken"):
        tensors.view("q", CudaArray((0, 8), mask=object()))
    with pytest.raises(TypeError, match="q: dtype >f4 must be in this machine's byte order"):
        tensors.view("q", CudaArray((0, 8), typestr=">f4"))
    with pytest.raises(ValueError, match=r"q: strides \(30, 4\) must be multiples of its 4 bytes"):
        tensors.view("q", CudaArray((0, 8), strides=(30, 4)))


def lacking(key: str) -> CudaArray:
    x = CudaArray((2, 8))
    del x.__cuda_array_interface__[key]
    return x


class Broken:
    """Whose interface cannot even be asked for."""

    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("the device\nis gone")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (CudaArray((2, 8), address=0), "address is null, though its shape"),
        (CudaArray((2, 8), address=4098), "address 0x1002 must be a multiple of .* 4 bytes"),
        (CudaArray((2, 8), typestr="<f2", address=4097), "must be a multiple of .* 2 bytes"),
        (CudaArray((-2, 8)), r"shape \(-2, 8\) must not be negative"),
        (CudaArray((2.5, 8)), "__cuda_array_interface__ is not usable: TypeError: 'float'"),
        (CudaArray((2, 8), typestr="<q9"), "__cuda_array_interface__ is not usable: TypeError"),
        (CudaArray((2, 8), typestr=None), "is not usable: TypeError: typestr None"),
        (CudaArray((2, 8), strides=(4,)), r"is not usable: ValueError: strides \(4,\) for shape"),
        (CudaArray((2, 8), stream=-5), "is not usable: ValueError: .*handle -5"),
        (lacking("shape"), "is not usable: KeyError: 'shape'"),
        (lacking("typestr"), "is not usable: KeyError: 'typestr'"),
        (lacking("data"), "is not usable: KeyError: 'data'"),
        (Broken(), "is not usable: RuntimeError: the device is gone"),
        (Packed((2, 8), data=0), "address is null"),
        (Packed((2, 8), data=4098), "address 0x1002 must be a multiple"),
        (Packed((2, 8), byte_offset=2), "address 0x100002 must be a multiple"),
        (Packed((2, -8)), r"shape \(2, -8\) must not be negative"),
        (Packed((2, 8), ndim=-1), "DLPack of Packed is not usable: ValueError: -1 dimensions"),
        (Packed((2, 8), capsule=b"dltensor_versioned"), "DLPack of Packed is not usable: Val"),
        (Packed((2, 8), error=BufferError("in\nuse")), "is not usable: BufferError: in use"),
    ],
)
def test_memory_that_cannot_be_addressed_is_refused(x, message, fake_gpu) -> None:
    with pytest.raises(ValueError, match=f"k: .*{message}") as caught:
        kernels.flash_attention(CudaArray((2, 8)), x, x)
    assert "\n" not in str(caught.value)
    assert fake_gpu.launches == []


@pytest.mark.parametrize(
    ("lies", "dtype"),
    [({"lanes": 2}, "float32x2"), ({"bits": 64}, "float64"), ({"code": 0}, "int32")],
)
def test_dlpack_types_that_are_not_taken(lies, dtype, fake_gpu) -> None:
    x = Packed((2, 8), **lies)
    with pytest.raises(TypeError, match=f"q: dtype {dtype} is not taken"):
        kernels.flash_attention(x, x, x, out=x)


def test_out_on_the_device_must_be_writable(fake_gpu) -> None:
    x = CudaArray((2, 8))
    with pytest.raises(ValueError, match="out: array is read-only"):
        kernels.flash_attention(x, x, x, out=CudaArray((2, 8), address=1 << 21, readonly=True))
    assert fake_gpu.launches == []


def test_dlpack_offsets_move_the_address(fake_gpu) -> None:
    assert tensors.view("q", Packed((2, 8), byte_offset=64)).pointer == (1 << 20) + 64


def test_arrays_on_host_and_device_do_not_mix_even_empty(fake_gpu) -> None:
    full, empty = CudaArray((2, 8)), zeros(0, 8)
    with pytest.raises(ValueError, match="k: is on the host, it must be with q on device 0"):
        kernels.flash_attention(full, empty, empty)
    with pytest.raises(ValueError, match="v: is on device 0, it must be with q on the host"):
        kernels.flash_attention(empty, empty, CudaArray((0, 8)))


@pytest.mark.parametrize(
    ("producer", "stream", "waits"),
    [
        (None, 99, []), (99, 99, []), (98, 99, [98]), (1, 99, [1]), (2, 99, [2]),
        (1, 0, []), (1, None, []), (98, None, [98]), (2, 0, [2]),
    ],
)  # fmt: skip
def test_a_producers_stream_is_waited_for(producer, stream, waits, fake_gpu) -> None:
    q, k, v = (CudaArray((2, 8), address=(1 << 30) + i * 4096) for i in range(3))
    out = CudaArray((2, 8), address=(1 << 30) + (1 << 20))
    for late in (q, k, v, out):
        fake_gpu.waits.clear()
        late.__cuda_array_interface__["stream"] = producer
        kernels.flash_attention(q, k, v, out=out, stream=stream)
        assert fake_gpu.waits == [(x, 1) for x in waits]
        late.__cuda_array_interface__["stream"] = None


@needs_numba
def test_waiting_is_done_in_the_devices_context(monkeypatch) -> None:
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        pytest.skip("the simulator has no driver")
    from kernels import driver

    seen = []

    @contextlib.contextmanager
    def on_device(device):
        seen.append(f"enter {device}")
        yield
        seen.append("leave")

    def synchronize(stream):
        seen.append(stream)
        return (0,)

    bindings = types.SimpleNamespace(cuStreamSynchronize=synchronize)
    monkeypatch.setattr(driver, "on_device", on_device)
    monkeypatch.setattr(driver, "driver", lambda: bindings)
    driver.wait_for(98, 1)
    driver.wait_for(1, 0)
    assert seen == ["enter 1", 98, "leave", "enter 0", 0, "leave"]


@pytest.mark.parametrize(("stream", "asked"), [(None, 1), (0, 1), (99, 99), (2, 2)])
def test_dlpack_producers_are_told_the_stream(stream, asked, fake_gpu) -> None:
    q, k, v, out = (Packed((2, 8), data=(i + 1) << 20) for i in range(4))
    kernels.flash_attention(q, k, v, out=out, stream=stream)
    assert [x.streams for x in (q, k, v, out)] == [[asked]] * 4
    assert fake_gpu.waits == []
    tensors.view("q", q)  # for no stream in particular: all may read
    assert fake_gpu.waits == [(1, 0)]


@pytest.mark.parametrize("make", [CudaArray, Packed])
def test_a_kernel_runs_on_the_device_of_its_memory(make, fake_gpu) -> None:
    where = {"address": 1 << 30} if make is CudaArray else {"data": 1 << 30, "device": 1}
    x, out = make((2, 8), **where), CudaArray((2, 8), address=(1 << 30) + 4096)
    kernels.flash_attention(x, x, x, out=out)
    assert fake_gpu.contexts == [1]
    assert [device for *_, device in fake_gpu.loads] == [1]


@needs_numba
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_kernel_gets_its_arguments_in_order(variant, return_lse, monkeypatch, fake_gpu) -> None:
    """Without a GPU: what would be launched, on addresses that nobody reads."""
    from kernels import flash_simt

    addresses = iter(range(1 << 20, 1 << 24, 1 << 20))

    def array(shape, strides=None) -> CudaArray:
        return CudaArray(shape, strides, address=next(addresses))

    monkeypatch.setattr(tensors, "empty", lambda like, shape, dtype, stream: array(shape))
    q = array((2, 4, 130, 8), (4 * 9000, 4 * 2000, 4 * 10, 4))
    k, v, out = array((2, 2, 70, 8)), array((2, 2, 70, 6)), array((2, 4, 130, 6))
    result = kernels.flash_attention(
        q, k, v, out=out, stream=99, scale=0.5, variant=variant, return_lse=return_lse,
        window_size=(11, -1), block_q=64,
    )  # fmt: skip
    assert (result[0] if return_lse else result) is out

    ((grid, stream, packed),) = fake_gpu.launches
    args = struct.unpack("7Q12q8qfq" if variant == "kv_outer" else "5Q12q8qfq", packed)
    assert (grid, stream) == (2 * 4 * 3 if variant == "q_outer" else 2 * 4, 99)
    pointers, strides, numbers = args[:-22], args[-22:-10], args[-10:]
    mib = 1 << 20
    stats = (
        [5 * mib, 6 * mib, 7 * mib][: len(pointers) - 4] if return_lse else [0, 5 * mib, 6 * mib]
    )
    assert list(pointers) == [mib, 2 * mib, 3 * mib, 4 * mib, *stats[: len(pointers) - 4]]
    assert strides == (
        9000, 2000, 10, 2 * 70 * 8, 70 * 8, 8, 2 * 70 * 6, 70 * 6, 6, 4 * 130 * 6, 130 * 6, 6
    )  # fmt: skip
    assert numbers == (130, 70, 8, 6, 4, 2, 11, 200, 0.5, int(return_lse))
    assert len(flash_simt.signature(variant, "float32").args) == len(pointers) + 4 + 10


def tensor(shape, strides, pointer=0) -> tensors.Tensor:
    return tensors.Tensor("q", "other", pointer, shape, strides, "float32", 4, 0, None)


@given(st.data())
def test_kernel_strides_address_every_element_or_are_refused(data) -> None:
    """Any axes order and steps of a contiguous base: right or refused, never wrong."""
    ndim = data.draw(st.integers(2, 5))
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(ndim))
    base = np.arange(np.prod(shape)).reshape(shape)
    view = base.transpose(data.draw(st.permutations(range(ndim))))
    view = view[tuple(slice(None, None, data.draw(st.sampled_from([1, 1, 2, -1]))) for _ in shape)]
    start = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // 8
    strides = tuple(step // 8 for step in view.strides)
    heads = view.shape[-3] if ndim > 2 else 1
    try:
        batch_step, head_step, row_step = tensor(view.shape, strides).kernel_strides()
    except ValueError as error:
        refused = str(error)
        assert "contiguous" in refused
        assert strides[-1] != 1 or ndim > 4
        return
    batch, h, r, c = np.indices((view.size // (heads * view.shape[-2] * view.shape[-1]), heads,
                                 *view.shape[-2:]))  # fmt: skip
    address = start + batch * batch_step + h * head_step + r * row_step + c
    np.testing.assert_array_equal(base.reshape(-1)[address].reshape(view.shape), view)


def test_a_tensors_span_covers_its_memory() -> None:
    assert tensor((2, 3), (10, 1), 100).span == (100, 100 + 4 * 13)
    assert tensor((2, 3), (-10, 1), 100).span == (60, 112)
    assert tensor((2, 0), (10, 1), 100).span == (100, 100)


tile_sizes = st.integers(1, 130)


@given(
    st.sampled_from(VARIANTS), tile_sizes, tile_sizes, st.integers(1, 32), st.integers(1, 16),
    st.sampled_from([(1, 1), (2, 2), (3, 2), (8, 16), (8, 32), (16, 16)]),
)  # fmt: skip
def test_buffers_do_not_overlap(variant, block_q, block_k, d, e, threads) -> None:
    ty, tx = threads
    d, e = layout.round_up(8 * d, tx), layout.round_up(8 * e, tx)
    grid = Layout(block_q, block_k, d, e, ty, tx)
    at = buffers(variant, grid)
    assert grid.rows >= block_q
    assert grid.keys >= block_k
    assert grid.keys % 4 == 0
    assert grid.kv_rows >= grid.keys
    K = (at.K, at.K + grid.kv_rows * at.d_pitch)
    V = (at.V, at.V + grid.kv_rows * at.e_pitch)
    taken = [
        (at.Q, at.Q + grid.rows * at.d_pitch),
        (at.P, at.P + grid.rows * at.p_pitch),
        (at.posts, at.posts + grid.rows * at.post_pitch),
    ]
    if variant == "kv_outer":
        taken += [K, V, (at.m, at.m + grid.rows), (at.l, at.l + grid.rows)]
    else:
        assert K[0] == V[0]
        taken.append(max(K, V))
    taken.sort()
    for (_, end), (start, _) in pairwise(taken):
        assert end <= start
    assert taken[-1][1] <= at.elems
    assert at.P % 4 == at.K % 4 == 0  # rows that are read 16 bytes at a time
    assert at.d_pitch % 8 == 4  # eight neighbouring rows fall into different banks


widths = st.integers(1, MAX_WIDTH) | st.sampled_from([128, 129, MAX_WIDTH])


@given(
    st.sampled_from(VARIANTS), widths, widths,
    st.sampled_from([49152, 65536, 101376, 166912, 232448]),
)  # fmt: skip
@example("kv_outer", MAX_WIDTH, MAX_WIDTH, 49152)
@example("q_outer", MAX_WIDTH, MAX_WIDTH, 49152)
@example("kv_outer", MAX_WIDTH, MAX_WIDTH, 65536)
def test_every_width_gets_tiles_that_fit_any_device(variant, d, e, shared_per_block) -> None:
    device = {"shared_per_block": shared_per_block, "shared_per_sm": shared_per_block + 1024}
    chosen = choose(variant, d, e, **device)
    needed = buffers(variant, chosen).bytes
    assert needed <= device["shared_per_block"]
    assert chosen.min_blocks * needed <= device["shared_per_sm"]
    assert chosen.threads * chosen.min_blocks * min(255, chosen.registers) <= 65536 or (
        chosen.min_blocks == 1
    )
    assert chosen.d >= d
    assert chosen.e >= e
    assert chosen.d % 8 == chosen.d % chosen.tx == chosen.e % chosen.tx == 0
    assert chosen.threads <= 1024


@given(
    st.sampled_from(VARIANTS), st.integers(1, MAX_WIDTH), st.integers(1, MAX_WIDTH),
    st.integers(1, 700), st.integers(1, 700),
)  # fmt: skip
def test_tiles_asked_for_are_used_or_refused(variant, d, e, block_q, block_k) -> None:
    try:
        chosen = choose(variant, d, e, block_q=block_q, block_k=block_k, **H200)
    except ValueError:
        with pytest.raises(ValueError, match=f"tiles of {block_q} x {block_k} "):
            choose(variant, d, e, block_q=block_q, block_k=block_k, **H200)
        return
    assert (chosen.block_q, chosen.block_k) == (block_q, block_k)
    assert chosen.threads <= 1024
    assert buffers(variant, chosen).bytes <= H200["shared_per_block"]


def test_tiles_that_do_not_fit_are_refused_with_both_sizes() -> None:
    needed = buffers("kv_outer", Layout(128, 128, 128, 128, 16, 16)).bytes
    with pytest.raises(ValueError, match=rf"block_q, block_k: .* need {needed} bytes .* 49152"):
        choose("kv_outer", 128, 128, block_q=128, block_k=128, **OLD)


def test_given_tiles_are_kept() -> None:
    chosen = choose("q_outer", 64, 64, block_q=40, **H200)
    assert (chosen.block_q, chosen.block_k) == (40, 64)
    chosen = choose("q_outer", 64, 64, block_k=8, **H200)
    assert (chosen.block_q, chosen.block_k) == (64, 8)


def test_a_problem_knows_its_grid() -> None:
    p = Problem.of((3, 4, 130, 8), (3, 2, 5, 8), (3, 2, 5, 7), "float16")
    assert p.programs("q_outer", 64) == 3 * 4 * 3
    assert p.programs("kv_outer", 64) == 3 * 4
    assert (p.out_shape, p.lse_shape) == ((3, 4, 130, 7), (3, 4, 130))
    huge = Problem.of((2**20, 2**12, 1, 8), (2**20, 1, 1, 8), (2**20, 1, 1, 8), "float16")
    with pytest.raises(ValueError, match="q: 4294967296 blocks are more than a grid's"):
        huge.programs("q_outer", 64)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_without_a_gpu_the_error_says_so_and_names_the_simulator(dtype) -> None:
    if kernels_gpu.device_count() or os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        pytest.skip("there is a GPU, or a simulator in its place")
    pytest.importorskip("numba_cuda")
    with pytest.raises(RuntimeError, match=r"no CUDA GPU was found.*NUMBA_ENABLE_CUDASIM=1"):
        kernels.flash_attention(*(x.astype(dtype) for x in (Q, K, V)))


@pytest.mark.parametrize("dtype", [np.dtype(">f4"), np.dtype(ml_dtypes.bfloat16)])
def test_numpy_arrays_travel_in_native_order_and_out_with_what_it_holds(
    dtype, fake_gpu, monkeypatch
) -> None:
    """What ``check`` writes into ``out`` reaches the GPU: an element never written stays so."""
    from kernels import _cuda

    memory = {}

    class OnGpu(CudaArray):
        def __init__(self, array) -> None:
            super().__init__(array.shape, typestr=array.dtype.str, address=(len(memory) + 1) << 20)
            self.array = array
            memory[(len(memory) + 1) << 20] = array

        def copy_to_host(self):
            return self.array

    stand_in = types.SimpleNamespace(
        to_device=lambda x: OnGpu(x.copy()),
        device_array=lambda shape, kind: OnGpu(np.zeros(shape, kind)),
        synchronize=lambda: None,
    )
    monkeypatch.setattr(_cuda, "cuda", stand_in)
    q, k, v = (np.arange(8).reshape(2, 4).astype(dtype) for _ in range(3))
    out = np.full((2, 4), np.nan).astype(dtype)
    kernels.flash_attention(q, k, v, out=out)
    ((_, _, packed),) = fake_gpu.launches
    args = struct.unpack_from("5Q", packed)
    native = dtype.newbyteorder("=")
    for address in args[:3]:
        assert memory[address].dtype.isnative
        np.testing.assert_array_equal(memory[address].view(native), q.astype(native))
    assert np.isnan(memory[args[3]].view(native).astype(np.float32)).all()
    assert np.isnan(out.astype(np.float32)).all()  # nothing ran


def in_new_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={name: x for name, x in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_importing_kernels_is_light() -> None:
    done = in_new_process(
        "import sys, kernels, kernels.cli, kernels.layout, kernels.problem, kernels.tensors\n"
        "assert callable(kernels.flash_attention)\n"
        "heavy = {'numba', 'numba_cuda', 'llvmlite', 'cuda', 'torch', 'cupy', 'simattn'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_without_numba_the_import_error_names_the_extra() -> None:
    done = in_new_process(
        "import sys; sys.modules['numba'] = None\n"
        "import numpy as np, kernels\n"
        "x = np.zeros((2, 4), np.float32)\n"
        "try:\n    kernels.flash_attention(x, x, x)\n"
        "except ImportError as error:\n    print(error)\n"
    )
    assert "pip install '.[cu13]'" in done.stdout, done.stderr


@needs_numba
def test_a_numpy_that_numba_cuda_cannot_compile_under_is_named() -> None:
    done = in_new_process(
        "import numba_cuda, numpy as np, kernels\n"
        "from numba import cuda\n"
        "np.__version__, numba_cuda.__version__ = '2.5.2', '0.30.4'\n"
        "x = np.zeros((2, 4), np.float32)\n"
        "try:\n    kernels.flash_attention(x, x, x)\n"
        "except ImportError as error:\n    print(error)\n"
    )
    assert done.stdout.strip() == (
        "numba-cuda 0.30.4 does not compile under NumPy 2.5.2: pip install 'numpy<2.5'"
    ), done.stderr


@needs_numba
def test_numpy_is_bounded_where_numba_cuda_needs_it() -> None:
    from kernels._cuda import numpy_too_new

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("cu13", "cu12", "test"):
        requirements = project["optional-dependencies"][extra]
        assert "numpy<2.5" in requirements, extra
        (numba_cuda,) = (r for r in requirements if r.startswith("numba-cuda"))
        version = re.search(r"==(\d+\.\d+)", numba_cuda).group(1)
        assert numpy_too_new("2.5.0", f"{version}.0")
    assert not numpy_too_new("2.4.6", "0.30.4")
    assert not numpy_too_new("2.6.0", "0.31.0")


def test_every_variant_has_a_kernel_and_a_closed_form() -> None:
    simattn = pytest.importorskip("simattn")
    for variant in problem.VARIANTS:
        assert simattn.predict(variant, n=4, d=2, block_q=2, block_k=2).traffic.total_elems
    assert layout.TILES[0] == (64, 64)


@pytest.mark.parametrize(
    ("dtype", "d", "e", "pointer", "row", "capability", "kernel"),
    [
        ("float16", 64, 96, 1024, 64, (9, 0), "sm90"),
        ("float16", 64, 96, 1024, 64, (8, 6), "mma"),
        ("float16", 64, 96, 1024, 64, (10, 0), "mma"),  # wgmma is Hopper's alone
        ("bfloat16", 256, 8, 1024, 256, (8, 0), "mma"),
        ("float16", 64, 64, 1024, 64, (7, 5), "q_outer"),  # no mma.sync with its shapes
        ("float16", 64, 60, 1024, 64, (9, 0), "q_outer"),
        ("float16", 64, 64, 1026, 64, (9, 0), "q_outer"),  # rows are not aligned to 16 bytes
        ("float16", 64, 64, 1024, 65, (9, 0), "q_outer"),
        ("float32", 64, 64, 1024, 64, (9, 0), "mma"),  # split TF32
        ("float32", 64, 64, 1028, 64, (9, 0), "q_outer"),
    ],
)
def test_the_kernel_chosen(dtype, d, e, pointer, row, capability, kernel) -> None:
    from kernels.plans import chosen

    problem = Problem.of((2, 5, d), (2, 7, d), (2, 7, e), dtype)
    size = 4 if dtype == "float32" else 2
    views = [
        tensors.Tensor(name, "torch", pointer, (2, rows, width), (rows * row, row, 1), dtype, size,
                       0, None)
        for name, rows, width in (("q", 5, d), ("k", 7, d), ("v", 7, e))
    ]  # fmt: skip
    assert chosen(problem, views, capability) == kernel
