"""The kernels on a GPU, at real sizes: values, containers, streams, strides, 64-bit offsets."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import kernels_gpu
import numpy as np
import pytest

import kernels
from kernels import check
from kernels.problem import TENSOR_CORES, VARIANTS

if not kernels_gpu.device_count() or os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
CASES = tuple(check.cases())


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile the grid's kernels side by side: one after the other they take minutes."""
    check.compile_for(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_float64(case: check.Case, compiled) -> None:
    outcome = check.examine(case)
    assert outcome.passed, outcome


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nothing_spills(variant, d, dtype) -> None:
    from kernels.compiled import Kernel, load
    from kernels.driver import limits
    from kernels.plans import tiles

    if limits(0).capability[0] != 9:
        pytest.skip("measured for compute capability 9.0")
    kernel = load(Kernel(variant, tiles(0, variant, d, d, None, None), dtype), 0).loaded
    assert kernel.local_bytes == 0
    assert kernel.registers <= 255


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_keys_take_no_part_and_visible_nan_stays_in_its_row(variant) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 200, 64), dtype=np.float32) for _ in range(3))
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[:, 150], bad_v[:, 150] = np.nan, np.inf
    options = {"is_causal": True, "variant": variant, "return_lse": True}
    clean, clean_lse = kernels.flash_attention(q, k, v, **options)
    dirty, dirty_lse = kernels.flash_attention(q, bad_k, bad_v, **options)
    np.testing.assert_array_equal(dirty[:, :150], clean[:, :150])
    np.testing.assert_array_equal(dirty_lse[:, :150], clean_lse[:, :150])
    assert np.isnan(dirty[:, 150:]).all()
    q[:, 7] = np.nan
    out = kernels.flash_attention(q, k, v, variant=variant, is_causal=True)
    assert np.isnan(out[:, 7]).all()
    others = np.arange(200) != 7
    np.testing.assert_array_equal(out[:, others], clean[:, others])


def test_tiles_too_large_for_the_device() -> None:
    x = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match=r"need \d+ bytes of shared memory, the device has \d+"):
        kernels.flash_attention(x, x, x, block_q=512, block_k=512)


def test_many_threads_compile_and_launch_once() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 50, 24), dtype=np.float32) for _ in range(3))
    with ThreadPoolExecutor(8) as pool:
        outs = list(
            pool.map(lambda _: kernels.flash_attention(q, k, v, block_q=20, block_k=28), range(16))
        )
    for out in outs:
        np.testing.assert_array_equal(out, outs[0])


# ---- Numba


def test_numba_arrays_and_streams() -> None:
    from numba import cuda

    rng = np.random.default_rng(0)
    host = [rng.standard_normal((3, 100, 32), dtype=np.float32) for _ in range(3)]
    expected = kernels.flash_attention(*host)
    stream = cuda.stream()
    for chosen in (None, stream, int(stream.handle), 0):
        arrays = [cuda.to_device(x) for x in host]
        cuda.synchronize()
        out, lse = kernels.flash_attention(*arrays, stream=chosen, return_lse=True)
        cuda.synchronize()
        assert type(out) is type(arrays[0])
        assert (out.dtype, lse.dtype, lse.shape) == (np.float32, np.float32, (3, 100))
        np.testing.assert_array_equal(out.copy_to_host(), expected)
    empty = cuda.device_array((3, 0, 32), np.float32)
    assert kernels.flash_attention(empty, arrays[1], arrays[2]).shape == (3, 0, 32)
    nothing = kernels.flash_attention(arrays[0], empty, empty).copy_to_host()
    assert nothing.shape == (3, 100, 32)
    assert not nothing.any()


def test_arrays_on_host_and_device_do_not_mix() -> None:
    from numba import cuda

    x = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match="k: is on the host, it must be with q on device 0"):
        kernels.flash_attention(cuda.to_device(x), x, x)


# ---- torch


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    torch.manual_seed(0)
    return torch


def reference(q, k, v, *, is_causal=False, left=None, dtype="float64"):
    """Attention in torch's own words on the GPU, causal aligned bottom-right."""
    import torch

    kind = getattr(torch, dtype)
    group = q.shape[-3] // k.shape[-3]
    q, k, v = q.to(kind), *(x.to(kind).repeat_interleave(group, -3) for x in (k, v))
    S = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    n, s = S.shape[-2:]
    everything = torch.ones(n, s, device=S.device)
    if is_causal:
        S = S.masked_fill(everything.triu(s - n + 1).bool(), -torch.inf)
    if left is not None:
        S = S.masked_fill(everything.tril(s - n - left - 1).bool(), -torch.inf)
    return torch.softmax(S, -1) @ v


def agrees(out, q, k, v, *, stores=1, **mask) -> bool:
    """Within twice the error of float32 in torch's own words, and a rounding for each store."""
    dtype = str(out.dtype).removeprefix("torch.")
    right = reference(q, k, v, **mask)
    other = reference(q, k, v, dtype="float32", **mask).double()
    rounding = check.EPS[dtype] / 2 * right.abs().max().item()
    allowed = 2 * (other - right).abs().max().item() + stores * rounding
    return (out.double() - right).abs().max().item() <= allowed + check.EPS["float32"]


def stores(variant: str, s: int, d: int) -> int:
    """How often a launch stores O."""
    from kernels.plans import tiles

    block_k = tiles(0, variant, d, d, None, None).block_k
    return -(-s // block_k) if variant == "kv_outer" else 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_tensors_where_they_lie(torch, dtype, variant) -> None:
    kind = getattr(torch, dtype)
    q = torch.randn(2, 300, 6, 64, device="cuda").to(kind).transpose(1, 2)  # strided views
    k, v = torch.randn(2, 2, 2, 333, 64, device="cuda").to(kind)
    before = [x.clone() for x in (q, k, v)]
    out, lse = kernels.flash_attention(q, k, v, is_causal=True, return_lse=True, variant=variant)
    assert (out.dtype, out.device, tuple(out.shape)) == (kind, q.device, (2, 6, 300, 64))
    assert (lse.dtype, tuple(lse.shape)) == (torch.float32, (2, 6, 300))
    assert agrees(out, q, k, v, is_causal=True, stores=stores(variant, 333, 64))
    for x, y in zip((q, k, v), before, strict=True):
        assert torch.equal(x, y)
    again = kernels.flash_attention(q, k, v, is_causal=True, variant=variant)
    assert torch.equal(again, out)


def test_torch_strides_are_right_or_refused(torch) -> None:
    qkv = torch.randn(2, 200, 3, 4, 40, device="cuda")
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # packed, the heads of one token side by side
    out = torch.full((2, 200, 4, 40), torch.nan, device="cuda").transpose(1, 2)
    assert kernels.flash_attention(q, k, v, out=out) is out
    assert agrees(out, q, k, v)
    shared = k[:, :1].expand(2, 4, 200, 40)  # one K for all heads, stride 0
    out = kernels.flash_attention(q, shared, shared)
    assert agrees(out, q, shared, shared)
    odd = torch.randn(2 * 4 * 200 * 40 + 1, device="cuda")[1:].view(2, 4, 200, 40)  # 4-byte aligned
    out = kernels.flash_attention(odd, odd, odd)
    assert agrees(out, odd, odd, odd)
    with pytest.raises(ValueError, match="q: last axis has stride 200, it must be contiguous"):
        kernels.flash_attention(torch.randn(40, 200, device="cuda").T, k[0, 0], v[0, 0])
    lead = torch.randn(3, 2, 4, 50, 40, device="cuda")
    out = kernels.flash_attention(lead, lead, lead)
    assert agrees(out, lead, lead, lead)
    crossed = lead.transpose(0, 1)
    with pytest.raises(ValueError, match=r"q: leading dimensions .* do not merge"):
        kernels.flash_attention(crossed, crossed, crossed)


def test_torch_refusals_touch_nothing(torch) -> None:
    q = torch.randn(4, 50, 32, device="cuda")
    out = torch.full_like(q, 7.0)
    wanting = q.clone().requires_grad_()
    with pytest.raises(ValueError, match="q: requires a gradient"):
        kernels.flash_attention(wanting, q, q, out=out)
    with torch.no_grad():
        kernels.flash_attention(wanting, q, q)
    with pytest.raises(ValueError, match="v: is on device cpu"):
        kernels.flash_attention(q, q, q.cpu(), out=out)
    with pytest.raises(TypeError, match="q: dtype float64"):
        kernels.flash_attention(q.double(), q.double(), q.double())
    with pytest.raises(ValueError, match="out: its memory range overlaps q's"):
        kernels.flash_attention(q, q.clone(), q.clone(), out=q)
    assert (out == 7).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_work_is_queued_on_torchs_current_stream(torch, variant) -> None:
    """Inputs are made late, on a stream that is busy: only a launch on that stream sees them."""
    side = torch.cuda.Stream()
    source = torch.randn(3, 2, 8, 512, 64, device="cuda")
    expected = kernels.flash_attention(*source, variant=variant)
    torch.cuda.synchronize()
    late = torch.zeros_like(source)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
        late.copy_(source)
        out = kernels.flash_attention(*late, variant=variant)
    side.synchronize()
    assert torch.equal(out, expected)
    for handle in (side, side.cuda_stream):
        late.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            late.copy_(source)
        out = kernels.flash_attention(*late, variant=variant, stream=handle)
        side.synchronize()
        assert torch.equal(out, expected)


def test_more_than_two_to_the_31_elements(torch) -> None:
    """Offsets are 64 bits wide: rows and keys past 2^31 elements, and heads that begin there."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free device memory")
    d, n = 128, 2**24 + 300  # n * d > 2^31
    long = torch.randn(n, d, device="cuda", dtype=torch.float16)
    few = torch.randn(70, d, device="cuda", dtype=torch.float16)

    out = kernels.flash_attention(long, few, few)  # rows of Q and O
    for rows in (slice(0, 100), slice(2**24 - 50, 2**24 + 300)):
        assert agrees(out[None, rows], long[None, rows], few[None], few[None])
    del out

    for variant in VARIANTS:  # rows of K and V: the last keys of a window
        out = kernels.flash_attention(few, long, long, window_size=(99, 0), variant=variant)
        tail = long[-169:]
        visits = stores(variant, 169, d) + 1  # the tail's tiles, however they are aligned
        qkv = few[None], tail[None], tail[None]
        assert agrees(out[None], *qkv, is_causal=True, left=99, stores=visits)
    del long

    many = torch.randn(2**18 + 3, 2, 32, d, device="cuda", dtype=torch.float16)  # batch and heads
    out = kernels.flash_attention(many, many, many)
    for part in (slice(0, 3), slice(2**18, 2**18 + 3)):
        assert agrees(out[part], many[part], many[part], many[part])


def test_two_devices(torch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    here, there = (torch.randn(4, 90, 32, device=f"cuda:{i}") for i in (0, 1))
    out = kernels.flash_attention(there, there, there)
    assert out.device == there.device
    assert agrees(out, there, there, there)
    with pytest.raises(ValueError, match="k: is on device 0, it must be with q on device 1"):
        kernels.flash_attention(there, here, here)


# ---- CuPy


def test_cupy_arrays_and_streams() -> None:
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((3, 100, 32)).astype(np.float16) for _ in range(3)]
    expected = kernels.flash_attention(*host)
    arrays = [cupy.asarray(x) for x in host]
    out, lse = kernels.flash_attention(*arrays, return_lse=True)
    assert isinstance(out, cupy.ndarray)
    assert isinstance(lse, cupy.ndarray)
    np.testing.assert_array_equal(out.get(), expected)
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        queued = kernels.flash_attention(*[x + 0 for x in arrays])
    side.synchronize()
    np.testing.assert_array_equal(queued.get(), expected)
    flipped = [x[:, ::-1] for x in arrays]  # negative strides
    cupy.cuda.Device().synchronize()
    out = kernels.flash_attention(*flipped, variant="kv_outer")
    right = kernels.flash_attention(*[np.ascontiguousarray(x[:, ::-1]) for x in host],
                                    variant="kv_outer")  # fmt: skip
    np.testing.assert_array_equal(out.get(), right)


# ---- whatever else


class Foreign:
    """A torch tensor that shows its DLPack side alone."""

    def __init__(self, tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dlpack_inputs_with_out(torch, dtype) -> None:
    q, k, v = torch.randn(3, 2, 80, 48, device="cuda").to(getattr(torch, dtype))
    expected = kernels.flash_attention(q, k, v)
    out = torch.empty_like(expected)
    torch.cuda.synchronize()
    kernels.flash_attention(Foreign(q), Foreign(k), Foreign(v), out=out)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    with pytest.raises(TypeError, match="out: must be given for q of type Foreign"):
        kernels.flash_attention(Foreign(q), Foreign(k), Foreign(v))


@pytest.mark.parametrize("variant", VARIANTS)
def test_bench_measures_a_shape(variant) -> None:
    from kernels.bench import measure

    row = measure(256, 64)
    assert row[variant]["seconds"] > 0
    assert row[variant]["local_bytes"] == 0


# ---- Which kernel


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_without_a_variant_the_fastest_kernel_that_takes_the_problem(torch, dtype) -> None:
    def tensors(n, s, d, e):
        make = functools.partial(torch.randn, device="cuda", dtype=getattr(torch, dtype))
        return make(2, 6, n, d), make(2, 2, s, d), make(2, 2, s, e)

    def same(a, b) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    for mask in ({}, {"is_causal": True}, {"window_size": (50, 3)}, {"scale": -0.3}):
        options = {"return_lse": True, **mask}
        aligned = tensors(300, 333, 64, 96)
        ours = kernels.flash_attention(*aligned, **options)
        fastest = kernels.prepare(*aligned, **options).variant
        assert fastest in TENSOR_CORES
        assert same(ours, kernels.flash_attention(*aligned, variant=fastest, **options))
        assert not torch.equal(
            ours[0], kernels.flash_attention(*aligned, variant="q_outer", **options)[0]
        )
        for other in (
            tensors(70, 80, 20, 20),  # a width that is no multiple of 8
            [x[..., 1:65] for x in tensors(70, 80, 72, 72)],  # rows off 16 bytes
            [x.float() for x in tensors(70, 80, 60, 60)],
        ):
            portable = kernels.flash_attention(*other, variant="q_outer", **options)
            assert same(kernels.flash_attention(*other, **options), portable)
    q, k, v = tensors(40, 50, 64, 64)
    out = torch.full_like(q, float("nan"))
    assert kernels.flash_attention(q, k, v, out=out) is out
    assert torch.equal(out, kernels.flash_attention(q, k, v))
    blocks = {"block_q": 32, "block_k": 32}
    assert torch.equal(
        kernels.flash_attention(q, k, v, **blocks),
        kernels.flash_attention(q, k, v, variant="q_outer", **blocks),
    )
    none, L = kernels.flash_attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert not none.any()
    assert torch.isneginf(L).all()
    assert kernels.flash_attention(q[:, :, :0], k, v).shape == (2, 6, 0, 64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = kernels.flash_attention(q, k, v)
    stream.synchronize()
    assert torch.equal(beside, out)
    host = [x.float().cpu().numpy().astype(np.float16) for x in (q, k, v)]
    on_gpu = [torch.from_numpy(x).cuda() for x in host]
    np.testing.assert_array_equal(
        kernels.flash_attention(*host), kernels.flash_attention(*on_gpu).cpu().numpy()
    )
