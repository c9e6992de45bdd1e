"""Tensor-core kernels on a GPU: values, repeats, graphs, threads, streams, large tensors, disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernels_gpu
import numpy as np
import pytest

import kernels
from kernels import check_cores
from kernels.problem import TENSOR_CORES

if not kernels_gpu.device_count() or os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent
CASES = [x for v in TENSOR_CORES for x in check_cores.cases(v) if check_cores.taken(x)]
VARIANTS = list(dict.fromkeys(case.variant for case in CASES))


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile the grid's kernels side by side: one after the other they take minutes."""
    from kernels.compiled import compile_all

    compile_all(check_cores.prepared_kernel(case) for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_float64(case, compiled) -> None:
    outcome = check_cores.examine(case)
    assert outcome.out_error <= outcome.out_allowed
    assert outcome.lse_error <= check_cores.LSE_ALLOWED


def test_nothing_spills(compiled) -> None:
    """The driver's assembler is not the toolkit's, which the compile checks ask."""
    from kernels.compiled import load

    shipped = dict.fromkeys(check_cores.prepared_kernel(case) for case in CASES)
    spilled = [x for x in shipped if load(x, 0).loaded.local_bytes]
    assert not spilled


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_that_are_larger_than_their_octaves(variant) -> None:
    """m is rounded to 64 and more: the largest weight would be 2**-32 or infinite."""
    torch.manual_seed(0)
    q, k, v = (1 + 0.3 * torch.randn(1, 8, 200, 64, device="cuda") for _ in range(3))
    q, k, v = (x.half() for x in (2e4 * q, 2e4 * k, v))
    out, lse = kernels.flash_attention(q, k, v, variant=variant, return_lse=True)
    L = (q.double() @ k.double().transpose(-1, -2) / 8).logsumexp(-1)
    assert (lse / L - 1).abs().max().item() < 4e-6
    best = (out.double() - plain(q, k, v)).abs().amax(-1) < 0.02
    assert best.double().mean().item() > 0.9  # float32 cannot always tell two such scores apart


def tensors(n=512, d=64, heads=4, batch=2, dtype=torch.float16):
    torch.manual_seed(n)
    return [torch.randn(batch, heads, n, d, device="cuda").to(dtype) for _ in range(3)]


def plain(q, k, v, is_causal=False):
    q, k, v = (x.double() for x in (q, k, v))
    S = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if is_causal:
        S = S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(S, -1) @ v


def close(out, q, k, v, is_causal=False) -> bool:
    return (out.double() - plain(q, k, v, is_causal)).abs().max().item() < 4e-3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_a_thousand_repeats_are_bitwise_equal(variant, d, is_causal) -> None:
    q, k, v = tensors(1000, d)
    first, L = kernels.flash_attention(
        q, k, v, variant=variant, is_causal=is_causal, return_lse=True
    )
    prepared = kernels.prepare(q, k, v, variant=variant, is_causal=is_causal, return_lse=True)
    differ = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        prepared.out.fill_(float("nan"))
        prepared.launch()
        differ += (prepared.out != first).sum() + (prepared.lse != L).sum()
    assert differ.item() == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_real_input(variant) -> None:
    with np.load(ROOT / "examples" / "data" / "minilm_layer0_qkv.npz") as file:
        q, k, v = (torch.from_numpy(file[x]).cuda().half() for x in "qkv")
    for is_causal in (False, True):
        out = kernels.flash_attention(q, k, v, variant=variant, is_causal=is_causal)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        right = plain(q, k, v, is_causal)
        allowed = 2 * (theirs.double() - right).abs().max() + right.abs().max() * 2**-11
        assert (out.double() - right).abs().max() <= allowed


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cuda_graph_replays_on_new_values(variant) -> None:
    q, k, v = tensors()
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.flash_attention(q, k, v, out=out, variant=variant)
        inside = kernels.flash_attention(out, k, v, variant=variant, is_causal=True)
    for seed in range(3):
        torch.manual_seed(seed)
        q.normal_()
        graph.replay()
        assert close(out, q, k, v)
        assert close(inside, out, k, v, is_causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kernel_first_met_inside_a_graph(variant) -> None:
    q, k, v = tensors(200, 48, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.flash_attention(q, k, v, variant=variant)
    graph.replay()
    expected = kernels.flash_attention(q, k, v, variant=variant)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_streams_and_threads_at_once(variant) -> None:
    problems = [tensors(n, d) for n in (100, 333, 700) for d in (64, 128)]
    expected = [kernels.flash_attention(*x, variant=variant) for x in problems]
    torch.cuda.synchronize()

    def work(i: int) -> bool:
        stream = torch.cuda.Stream()
        good = True
        with torch.cuda.stream(stream):
            for j in range(50):
                x = problems[(i + j) % len(problems)]
                out = kernels.flash_attention(*x, variant=variant)
                good &= torch.equal(out, expected[(i + j) % len(problems)])
        return good

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_work_is_queued_on_the_current_stream(variant) -> None:
    """Inputs are made late: only a launch on the same stream sees them."""
    source = tensors()
    expected = kernels.flash_attention(*source, variant=variant)
    late = [torch.zeros_like(x) for x in source]
    side = torch.cuda.Stream()
    for _ in range(2):  # the second call is a repeat of the first
        for x in late:
            x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            for x, y in zip(late, source, strict=True):
                x.copy_(y)
            out = kernels.flash_attention(*late, variant=variant)
        side.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_than_two_to_the_31_elements(variant) -> None:
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free device memory")
    d, n = 128, 2**24 + 300  # n * d > 2^31
    long = torch.randn(n, d, device="cuda", dtype=torch.float16)
    few = torch.randn(70, d, device="cuda", dtype=torch.float16)
    out = kernels.flash_attention(long, few, few, variant=variant)  # rows of Q and O
    for rows in (slice(0, 100), slice(2**24 - 50, 2**24 + 300)):
        assert close(out[rows], long[rows], few, few)
    out = kernels.flash_attention(few, long, long, window_size=(99, 0), variant=variant)
    for row in range(70):  # the last keys
        end = n - 69 + row
        assert close(out[row][None], few[row][None], long[end - 100 : end], long[end - 100 : end])
    del out, long
    many = torch.randn(2**18 + 3, 2, 32, d, device="cuda", dtype=torch.float16)
    out = kernels.flash_attention(many, many, many, variant=variant)
    for part in (slice(0, 3), slice(2**18, 2**18 + 3)):
        assert close(out[part], many[part], many[part], many[part])


@pytest.mark.parametrize("variant", VARIANTS)
def test_strided_views_where_they_lie(variant) -> None:
    packed = torch.randn(2, 300, 3, 4, 64, device="cuda").half()
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    out = torch.full((2, 300, 4, 64), torch.nan, device="cuda").half().transpose(1, 2)
    assert kernels.flash_attention(q, k, v, out=out, variant=variant) is out
    assert close(out, q, k, v)
    shared = k[:, :1].expand(2, 4, 300, 64)  # one K for all heads, stride 0
    assert close(kernels.flash_attention(q, shared, shared), q, shared, shared)
    beside = torch.full((2, 4, 300, 96), 7.0, device="cuda").half()
    kernels.flash_attention(q, k, v, out=beside[..., 16:80], variant=variant)
    assert close(beside[..., 16:80], q, k, v)
    assert (beside[..., :16] == 7).all()
    assert (beside[..., 80:] == 7).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_and_infinity_stay_where_they_are_seen(variant) -> None:
    q, k, v = tensors(400, 64)
    clean, clean_L = kernels.flash_attention(
        q, k, v, is_causal=True, return_lse=True, variant=variant
    )
    for bad in (float("nan"), float("inf"), -float("inf")):
        bad_v, bad_k = v.clone(), k.clone()
        bad_v[..., 300, :] = bad
        out = kernels.flash_attention(q, k, bad_v, is_causal=True, variant=variant)
        # Rows that share a tile with such a value are summed again, in another order.
        assert (out - clean)[..., :300, :].abs().max() <= 2e-3
        assert not torch.isfinite(out[..., 300:, :]).any()
        bad_k[..., 300, 5] = bad
        out, L = kernels.flash_attention(
            q, bad_k, v, is_causal=True, return_lse=True, variant=variant
        )
        assert (out - clean)[..., :300, :].abs().max() <= 2e-3
        assert (L - clean_L)[..., :300].abs().max() <= 1e-5


# ---- the launch path


def test_a_repeated_call_is_the_first_one_again() -> None:
    q, k, v = tensors(300, 64)
    first, L = kernels.flash_attention(q, k, v, return_lse=True)
    again, L2 = kernels.flash_attention(q, k, v, return_lse=True)
    assert torch.equal(first, again)
    assert torch.equal(L, L2)
    q2, k2, v2 = (x.flip(-2).contiguous() for x in (q, k, v))
    other = kernels.flash_attention(q2, k2, v2)
    assert close(other, q2, k2, v2)
    out = torch.empty_like(q)
    for _ in range(2):
        out.fill_(float("nan"))
        assert kernels.flash_attention(q, k, v, out=out) is out
        assert torch.equal(out, first)
    with pytest.raises(ValueError, match="out: its memory range overlaps q's"):
        kernels.flash_attention(q, k, v, out=q)
    with pytest.raises(TypeError, match="is_causal: 1 must be True or False"):
        kernels.flash_attention(q, k, v, is_causal=1)
    kernels.flash_attention(q, k, v, is_causal=True)
    with pytest.raises(TypeError, match="is_causal: 1 must be True or False"):
        kernels.flash_attention(q, k, v, is_causal=1)
    wanting = q.clone().requires_grad_()
    with pytest.raises(ValueError, match="q: requires a gradient"):
        kernels.flash_attention(wanting, k, v)


def test_prepared_launches_see_new_values_and_say_what_they_are() -> None:
    q, k, v = tensors(300, 64)
    prepared = kernels.prepare(q, k, v, return_lse=True)
    assert prepared.variant in TENSOR_CORES
    assert f"Prepared({prepared.variant}, float16, tiles " in repr(prepared)
    assert prepared.registers > 100
    for seed in range(3):
        torch.manual_seed(seed)
        q.normal_()
        prepared.launch()
        expected, L = kernels.flash_attention(q, k, v, return_lse=True)
        assert torch.equal(prepared.out, expected)
        assert torch.equal(prepared.lse, L)
    with pytest.raises(TypeError, match="prepare takes arrays on a GPU"):
        kernels.prepare(*(x.cpu().numpy() for x in (q, k, v)))
    empty = kernels.prepare(q[..., :0, :], k, v)
    empty.launch()
    assert empty.out.shape == (2, 4, 0, 64)


def test_a_variant_that_is_not_for_the_problem_says_why() -> None:
    q, k, v = (x[..., :60] for x in tensors())
    for variant in TENSOR_CORES:
        with pytest.raises(ValueError, match=f"variant: '{variant}' is not for this problem: "):
            kernels.flash_attention(q, k, v, variant=variant)
        with pytest.raises(ValueError, match="block_q, block_k: are for q_outer and kv_outer"):
            kernels.flash_attention(*tensors(), variant=variant, block_q=64)


def host_microseconds(launch, times: int = 300) -> float:
    """The least mean time of a call, of 5 groups; the GPU has little to do."""
    launch()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            launch()
        best = min(best, (time.perf_counter() - start) / times)
    torch.cuda.synchronize()
    return best * 1e6


def test_the_host_takes_no_longer_than_torch() -> None:
    q, k, v = tensors(64, 64, 1, 1)
    out = torch.empty_like(q)
    prepared = kernels.prepare(q, k, v, out=out)
    ours = host_microseconds(lambda: kernels.flash_attention(q, k, v, out=out))
    fresh = host_microseconds(lambda: kernels.flash_attention(q, k, v))
    alone = host_microseconds(prepared.launch)
    theirs = host_microseconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    print(f"host: {ours:.1f} us with out, {fresh:.1f} without, prepared {alone:.1f}, "
          f"torch {theirs:.1f}")  # fmt: skip
    assert ours <= max(30, theirs)
    assert alone <= ours


def test_a_new_process_takes_the_kernel_from_disk(tmp_path) -> None:
    code = (
        "import time, torch, kernels\n"
        "q = torch.ones(1, 1, 64, 56, device='cuda', dtype=torch.float16)\n"
        "p = kernels.prepare(q, q, q)\n"
        "p.launch()\n"
        "import sys\n"
        "print(p.from_disk, p.compile_seconds, 'numba' in sys.modules, bool((p.out == 1).all()))\n"
    )
    env = os.environ | {"SIMATTN_CACHE_DIR": str(tmp_path)}
    answers = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(done.stdout.split())
    print(f"first {answers[0][1]} s, from disk {answers[1][1]} s")
    assert [x[0] for x in answers] == ["False", "True"]
    assert answers[1][2] == "False"  # Numba is not even imported
    assert all(x[3] == "True" for x in answers)
    assert float(answers[1][1]) < 0.5
