"""Devices and time floors: every term by hand, and what is wrong with a device file by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simattn.device import DEVICES, device, dram_floor_bytes, floor_of, shared_bytes, time_floor
from simattn.iomodel import predict
from simattn.variants import VARIANTS

GOOD = """
sms = 2
sram_bytes = 1024
l2_bytes = 4096
dram_bytes_per_s = 1e9
l2_bytes_per_s = 4e9
shared_bytes_per_s = 8e9
exp_per_s = 1e9
[matmul_flops_per_s]
float16 = 2e10
"""


def test_named_devices_state_their_sources() -> None:
    assert {"a100", "h100", "h200", "classroom"} <= set(DEVICES)
    for machine in DEVICES.values():
        assert machine.source
        assert machine.dram_bytes_per_s < machine.l2_bytes_per_s < machine.shared_bytes_per_s
    assert DEVICES["a100"].sram_bytes == 163 * 1024
    assert DEVICES["h100"].sram_bytes == DEVICES["h200"].sram_bytes == 227 * 1024
    # FlashAttention-3 (arXiv 2407.08608, section 2.2) has 3.9 T exponentials a second of an H100
    assert DEVICES["h100"].exp_per_s == pytest.approx(3.9e12, rel=0.01)


def test_the_terms_by_hand() -> None:
    """q_outer, N 64, d 8, tiles 16 x 16 of float16, on the teaching machine."""
    N, d, Tr = 64, 8, 4
    f = time_floor(DEVICES["classroom"], "q_outer", n=N, d=d, block_q=16, block_k=16)
    assert f.dram_bytes == 2 * 4 * N * d
    assert f.l2_bytes == 2 * (2 * N * d + 2 * N * d * Tr)
    assert f.matmul_flops == 4 * N * N * d
    exps = N * N + N * Tr  # P, and the factors
    assert f.terms_s["dram"] == f.dram_bytes / 1e9
    assert f.terms_s["l2"] == f.l2_bytes / 4e9
    assert f.terms_s["matmul"] == f.matmul_flops / 32e9
    assert f.terms_s["exp"] == exps / 1e9
    assert f.seconds == max(f.terms_s.values()) == f.terms_s[f.binds]
    assert f.flops_per_dram_byte == 4 * N * N * d / (8 * N * d)
    assert f.flops_per_l2_byte == f.matmul_flops / f.l2_bytes


def test_with_registers_only_loaded_tiles_pass_through_shared_memory() -> None:
    N, d, B = 64, 8, 16
    tiles = (N // B) ** 2
    for dtype, width in (("float16", 2), ("float32", 4)):
        shape = {"n": N, "d": d, "block_q": B, "block_k": B}
        counts = predict("q_outer", dtype=dtype, **shape)
        got = shared_bytes(DEVICES["a100"], "q_outer", counts, dtype=dtype, **shape)
        written = N * d + 2 * (N // B) * N * d  # Q, K, V tiles as they are loaded
        read = tiles * 3 * B * d  # Q, K and V, by the two products of each pair of tiles
        assert got == (written + read) * width
        everything = shared_bytes(DEVICES["classroom"], "q_outer", counts, dtype=dtype, **shape)
        assert everything == counts.sram.read_bytes + counts.sram.write_bytes > got


@pytest.mark.parametrize("variant", VARIANTS)
def test_dram_never_sees_more_than_is_counted(variant: str) -> None:
    for n, causal in ((64, False), (4096, True)):
        shape = {"n": n, "d": 64, "heads": 4, "dtype": "float16", "is_causal": causal}
        counts = predict(variant, block_q=64, block_k=64, **shape)
        least = dram_floor_bytes(DEVICES["a100"], counts, **shape)
        assert 4 * 4 * n * 64 * 2 <= least <= counts.traffic.total_bytes


def test_scores_that_fit_l2_need_no_dram() -> None:
    small, large = (
        time_floor(DEVICES["a100"], "standard_row", n=n, d=64, block_q=16, block_k=n)
        for n in (1024, 16384)
    )
    assert small.dram_bytes == 4 * 1024 * 64 * 2
    outgrown = 2 * (2 * 16384**2 - DEVICES["a100"].l2_bytes)  # out and in, of S and of P
    assert large.dram_bytes == 4 * 16384 * 64 * 2 + 2 * outgrown
    assert large.binds == "dram"


def test_grouped_heads_come_from_dram_once() -> None:
    shape = {"n": 512, "d": 64, "heads": 8, "kv_heads": 2, "block_q": 64, "block_k": 64}
    f = time_floor(DEVICES["h100"], "q_outer", **shape)
    assert f.dram_bytes == 2 * 512 * 64 * (8 + 2 + 2 + 8)


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    machine = device(str(file))
    assert machine.name == "mine"
    assert machine.sram_bytes == 1024
    assert machine.registers is True
    assert machine.matmul_flops_per_s == {"float16": 2e10}
    f = time_floor(machine, "kv_outer", n=64, d=8, block_q=16, block_k=16)
    assert f.terms_s["dram"] == f.dram_bytes / 1e9
    counts = predict("kv_outer", n=64, d=8, block_q=16, block_k=16)
    with pytest.raises(ValueError, match="dtype 'float32': mine states peaks for float16"):
        floor_of(machine, counts, dtype="float32", dram_bytes=0, shared_bytes=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("sms = 2", ""), "lacks sms"),
        (("sms = 2", "sms = 2.5"), "sms 2.5 must be a whole number"),
        (("sms = 2", "sms = 0"), "sms 0 must be a whole number"),
        (("exp_per_s = 1e9", "exp_per_s = -1"), "exp_per_s -1 must be a number above 0"),
        (("exp_per_s = 1e9", f"exp_per_s = 1{'0' * 400}"), "must be a number above 0"),
        (("exp_per_s = 1e9", "exp_per_s = inf"), "exp_per_s inf must be a number above 0"),
        (("exp_per_s = 1e9", "exp_per_s = true"), "exp_per_s True must be a number above 0"),
        (("exp_per_s = 1e9", "exps = 3\nexp_per_s = 1e9"), "exps is not a field"),
        (("float16", "float8"), "matmul_flops_per_s must be a table with some of float16"),
        (("sms = 2", "sms = 2\nregisters = 1"), "registers 1 must be true or false"),
        (("sms = 2", "sms ="), "must be TOML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace(*change))
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        device(str(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device 'v100': must be one of a100, h100, h200"):
        device("v100")
    with pytest.raises(ValueError, match="must be readable"):
        device("no such file.toml")
