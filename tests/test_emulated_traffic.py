"""Three counts of a tensor-core kernel's traffic: its own source's, simattn's run, closed form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import cli, emulated, sm90_layout, traffic
from kernels.problem import DTYPES
from kernels.traffic import compare

ROOT = Path(__file__).parent.parent
SHORT = ("float16", "bfloat16")
KERNELS = [("mma", dtype) for dtype in DTYPES] + [("sm90", dtype) for dtype in SHORT]


def equal(variant="mma", **options) -> traffic.Comparison:
    """The comparison; its three sources must agree in everything."""
    found = compare(variant=variant, **options)
    assert found.equal
    for source in (found.run, found.predicted):
        assert found.kernel.reads == source.reads
        assert found.kernel.writes == source.writes
        assert found.kernel.read_bytes == source.read_bytes
        assert found.kernel.write_bytes == source.write_bytes
    return found


@pytest.mark.parametrize(("variant", "dtype"), KERNELS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 33, "n_k": 70, "block_k": 32},
        {"is_causal": True, "return_lse": True},
        {"is_causal": True, "n": 75, "n_k": 40},
        {"window_size": (10, 3), "block_k": 16},
        {"window_size": (-1, 5), "n": 40, "n_k": 90},
        {"heads": 4, "kv_heads": 2, "batch": 2, "n": 20, "dv": 40},
        {"d": 72, "dv": 8, "return_lse": True, "block_q": 64},
    ],
    ids=str,
)
def test_three_counts_are_one(variant, dtype, options):
    rows = {"n": 50, "block_q": 32} if variant == "mma" else {"n": 80, "block_q": 64}
    equal(variant, **rows | {"d": 16, "dtype": dtype} | options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_by_hand(dtype):
    found = equal(n=70, n_k=50, d=24, dv=40, block_q=32, block_k=32, dtype=dtype, return_lse=True)
    row_tiles = 3
    reads = {"Q": 70 * 24, "K": row_tiles * 50 * 24, "V": row_tiles * 50 * 40}
    writes = {"O": 70 * 40, "L": 70}
    size = DTYPES[dtype]
    assert (found.kernel.reads, found.kernel.writes) == (reads, writes)
    assert found.kernel.read_bytes == {name: size * x for name, x in reads.items()}
    assert found.kernel.write_bytes == {"O": size * 70 * 40, "L": 4 * 70}
    # Rows are whole 16-byte chunks: where they are whole sectors too, a sector is read once.
    assert found.sectors["reads"]["V"] * 32 >= found.kernel.read_bytes["V"]
    if 40 * size % 32 == 0:
        assert found.sectors["reads"]["V"] * 32 == found.kernel.read_bytes["V"]


@pytest.mark.parametrize("dtype", SHORT)
def test_counts_of_sm90_by_hand(dtype):
    """Tensor copies read what a tensor has; the chip fetches whole boxes, 128 bytes a row."""
    options = {"n": 70, "n_k": 50, "d": 24, "dv": 72, "block_q": 64, "block_k": 32, "dtype": dtype}
    found = equal("sm90", **options, return_lse=True)
    row_tiles, key_tiles = 2, 2
    assert found.kernel.reads == {"Q": 70 * 24, "K": row_tiles * 50 * 24, "V": row_tiles * 50 * 72}
    assert found.kernel.writes == {"O": 70 * 72, "L": 70}
    assert {name: 32 * x for name, x in found.sectors["reads"].items()} == {
        "Q": row_tiles * 64 * 128,
        "K": row_tiles * key_tiles * 32 * 128,
        "V": row_tiles * key_tiles * 32 * 2 * 128,
    }


blocks = st.sampled_from([16, 32, 64])
widths = st.sampled_from([8, 16, 24, 40])
sides = st.integers(-1, 40)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries(
        {
            "n": st.integers(1, 80), "n_k": st.integers(1, 80), "d": widths, "dv": widths,
            "batch": st.integers(1, 2), "block_q": blocks, "block_k": blocks,
            "is_causal": st.booleans(), "window_size": st.tuples(sides, sides),
            "return_lse": st.booleans(), "dtype": st.sampled_from(sorted(DTYPES)),
        }
    ),
    st.sampled_from([(1, 1), (2, 1), (2, 2)]),
)  # fmt: skip
def test_three_counts_are_one_for_any_shape(options, heads):
    equal(heads=heads[0], kv_heads=heads[1], **options)


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries(
        {
            "n": st.integers(1, 140), "n_k": st.integers(1, 80), "d": widths, "dv": widths,
            "batch": st.integers(1, 2), "block_q": st.sampled_from([64, 128]),
            "block_k": st.sampled_from([16, 48]), "is_causal": st.booleans(),
            "window_size": st.tuples(sides, sides), "return_lse": st.booleans(),
            "dtype": st.sampled_from(SHORT),
        }
    ),
    st.sampled_from([(1, 1), (2, 1), (2, 2)]),
)  # fmt: skip
def test_three_counts_of_sm90_are_one_for_any_shape(options, heads):
    equal("sm90", heads=heads[0], kv_heads=heads[1], **options)


@pytest.mark.parametrize("dtype", SHORT)
def test_sm90_has_a_gpus_tiles_by_default(dtype):
    found = equal("sm90", n=140, d=64, heads=2, kv_heads=1, dtype=dtype, is_causal=True)
    layout = sm90_layout.layout_for(64, 64, n=140, s=140)
    assert found.problem["block_q"] == min(140, layout.block_q)
    assert found.problem["block_k"] == min(140, layout.block_k)


def test_the_command_needs_no_gpu_and_no_setting():
    hidden = {"NUMBA_ENABLE_CUDASIM", "CUDA_VISIBLE_DEVICES"}
    env = {name: x for name, x in os.environ.items() if name not in hidden}
    argv = "traffic --variant mma --n 70 --d 24 --dtype bfloat16 --causal --lse --format json"
    done = subprocess.run(
        [sys.executable, "-m", "kernels", *argv.split()], cwd=ROOT, capture_output=True, text=True,
        env=env | {"CUDA_VISIBLE_DEVICES": "-1"}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["equal"] is True
    assert report["kernel"] == report["simattn"] == report["closed_form"]
    assert report["kernel"]["reads"] == {name: 70 * 24 for name in "QKV"}
    assert report["sectors"]["reads"] == {name: 70 * 24 * 2 // 32 for name in "QKV"}
    assert (report["block_q"], report["block_k"]) == (70, 64)  # a GPU's tiles, clamped


@pytest.mark.parametrize(
    ("argv", "less"),
    [
        ("--variant mma --n 40 --block-q 32", {"warps": 1}),
        ("--variant sm90 --n 70 --block-q 128 --dtype float16", {"groups": 1}),
    ],
)
def test_a_kernel_that_moves_more_is_told(argv, less, monkeypatch, capsys):
    honest = emulated.attention

    def wasteful(*arrays, layout, **options):
        return honest(*arrays, layout=replace(layout, **less), **options)

    monkeypatch.setattr(emulated, "attention", wasteful)
    assert cli.main(["traffic", *argv.split()]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "DIFFERENT"


@pytest.mark.parametrize(
    ("variant", "argv", "message"),
    [
        ("mma", "--block-q 8", "block_q: 8 must be one of 16, 32, 64, 128, 256"),
        ("mma", "--block-k 48", "block_k: 48 must be one of 16, 32, 64, 128, 256"),
        ("mma", "--d 12", "d, dv: 12 and 12 must be multiples of 8, at most 256"),
        ("mma", "--d 264", "width 264 must be 1 to 256"),
        ("mma", "--n 99999", "multiply-adds are too many to simulate, at most 67108864"),
        ("mma", "--n 2000 --block-q 16 --block-k 16", "pairs of tiles are too many to simulate"),
        ("mma", "--dtype float16 --batch 2000 --n 1", "2000 pairs of tiles are too many"),
        ("mma", "--d 256 --n 300 --block-k 256", "block_q, block_k: 64 x 256 take "),
        ("sm90", "", "dtype: float32 must be float16 or bfloat16 for sm90"),
        ("sm90", "--dtype float16 --block-q 32", "block_q: 32 must be one of 64, 128, 192"),
        ("sm90", "--dtype float16 --block-k 136", "block_k: 136 must be one of 16, 32, 48, 64, "),
        ("sm90", "--dtype float16 --d 12", "d, dv: 12 and 12 must be multiples of 8, at most 256"),
        (
            "sm90",
            "--dtype float16 --d 256 --block-q 192 --block-k 128",
            "192 x 128 take 386208 bytes of ",
        ),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_in_one_line(variant, argv, message, capsys):
    assert cli.main(["traffic", "--variant", variant, *argv.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize("variant", ["q_outer", "sm80", 3])
def test_an_unknown_variant_is_not_taken_for_another(variant):
    q = np.zeros((1, 16, 8), np.float16)
    with pytest.raises(ValueError, match=f"variant: {variant!r} must be one of sm90, mma"):
        emulated.attention(q, q, q, variant=variant)


@pytest.mark.parametrize("name", ["n", "d", "n_k", "heads", "block_q"])
def test_sizes_of_zero_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: 0 must be at least 1"):
        compare(**({"variant": "mma", "n": 8, "d": 8} | {name: 0}))
