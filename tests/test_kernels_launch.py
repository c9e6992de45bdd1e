"""Validation, tile choice and imports of ``kernels``: what can be wrong before a launch.

Needs no GPU, and numba only where a test says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
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
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels import launch, layout, problem, tensors
from kernels.launch import choose
from kernels.layout import Layout, buffers
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
        ({"window_size": (1.5, 2)}, TypeError, "window_size: 1.5 must be a whole number"),
        ({"scale": np.inf}, ValueError, "scale: inf must be finite"),
        ({"scale": float("nan")}, ValueError, "scale: nan must be finite"),
        ({"scale": 1e300}, ValueError, r"scale: 1e\+300 must be finite in float32"),
        ({"scale": "big"}, TypeError, "scale: 'big' must be a number"),
        ({"is_causal": 1}, TypeError, "is_causal: 1 must be True or False"),
        ({"softcap": 5.0}, NotImplementedError, "softcap: 5.0 must be 0"),
        ({"variant": "two_pass"}, ValueError, "variant: 'two_pass' must be one of q_outer, kv_"),
        ({"block_q": 0}, ValueError, "block_q: 0 must be at least 1"),
        ({"block_k": -3}, ValueError, "block_k: -3 must be at least 1"),
        ({"block_k": 2.5}, TypeError, "block_k: 2.5 must be a whole number"),
        ({"out": zeros(2, 4, 5, 8)}, ValueError, r"out: shape .* must be \(2, 4, 5, 6\)"),
        ({"out": zeros(2, 4, 5, 6, dtype=np.float16)}, TypeError, "out: dtype float16 must be q's"),
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


def test_out_must_not_overlap_the_inputs() -> None:
    memory = np.ones(3 * 40, np.float32)
    q, k = memory[:40].reshape(5, 8), memory[40:80].reshape(5, 8)
    with pytest.raises(ValueError, match="out: memory overlaps k's"):
        kernels.flash_attention(q, k, k, out=memory[79:119].reshape(5, 8))
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
    for wrong in ("fast", True, 1.5):
        with pytest.raises(TypeError, match=r"stream: .* must be None, an integer handle"):
            tensors.stream_of(q, wrong)


class CudaArray:
    """Device memory, described by its interface alone."""

    def __init__(self, shape, strides=None, typestr="<f4", **rest) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "strides": strides, "typestr": typestr, "data": (0, False), **rest,
        }  # fmt: skip


@needs_numba
def test_device_arrays_by_their_interface() -> None:
    x = tensors.view("q", CudaArray((2, 0, 8)))
    assert (x.container, x.shape, x.dtype, x.strides) == ("other", (2, 0, 8), "float32", (0, 8, 1))
    with pytest.raises(TypeError, match="q: masked arrays are not taken"):
        tensors.view("q", CudaArray((0, 8), mask=object()))
    with pytest.raises(TypeError, match="q: dtype >f4 must be in this machine's byte order"):
        tensors.view("q", CudaArray((0, 8), typestr=">f4"))
    with pytest.raises(ValueError, match=r"q: strides \(30, 4\) must be multiples of its 4 bytes"):
        tensors.view("q", CudaArray((0, 8), strides=(30, 4)))


@needs_numba
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_kernel_gets_its_arguments_in_order(variant, return_lse, monkeypatch) -> None:
    """Without a GPU: what would be launched, on addresses that nobody reads."""
    from kernels import compiled

    launched = []

    class Kernel:
        def launch(self, grid, stream, args, kinds) -> None:
            launched.append((grid, stream, args, kinds))

    addresses = iter(range(1 << 20, 1 << 24, 1 << 20))

    def array(shape, strides=None) -> CudaArray:
        x = CudaArray(shape, strides)
        x.__cuda_array_interface__["data"] = (next(addresses), False)
        return x

    limits = compiled.Limits(232448, 233472, 65536, (9, 0))
    monkeypatch.setattr(compiled, "limits", lambda device: limits)
    monkeypatch.setattr(compiled, "device_of", lambda pointer: 0)
    monkeypatch.setattr(compiled, "load", lambda *wanted: Kernel())
    monkeypatch.setattr(compiled, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tensors, "empty", lambda like, shape, dtype, stream: array(shape))
    q = array((2, 4, 130, 8), (4 * 9000, 4 * 2000, 4 * 10, 4))
    k, v, out = array((2, 2, 70, 8)), array((2, 2, 70, 6)), array((2, 4, 130, 6))
    result = kernels.flash_attention(
        q, k, v, out=out, stream=99, scale=0.5, variant=variant, return_lse=return_lse,
        window_size=(11, -1), block_q=64,
    )  # fmt: skip
    assert (result[0] if return_lse else result) is out

    ((grid, stream, args, kinds),) = launched
    assert len(args) == len(kinds) == (29 if variant == "kv_outer" else 27)
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
    assert len(compiled.signature(variant, "float32").args) == len(pointers) + 4 + 10


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


@given(
    st.sampled_from(VARIANTS), st.integers(1, MAX_WIDTH), st.integers(1, MAX_WIDTH),
    st.sampled_from([H200, OLD, {"shared_per_block": 101376, "shared_per_sm": 102400}]),
)  # fmt: skip
def test_every_width_gets_tiles_that_fit_the_device(variant, d, e, device) -> None:
    try:
        chosen = choose(variant, d, e, **device)
    except ValueError:
        assert device is OLD  # 48 KiB cannot hold the widest rows
        return
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
    if kernels_gpu.device_count():
        pytest.skip("there is a GPU")
    pytest.importorskip("numba_cuda")
    with pytest.raises(RuntimeError, match=r"no CUDA GPU was found.*NUMBA_ENABLE_CUDASIM=1"):
        kernels.flash_attention(*(x.astype(dtype) for x in (Q, K, V)))


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
    assert "pip install 'simattn[cu13]'" in done.stdout, done.stderr


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
    assert launch.TILES[0] == (64, 64)
