"""The command line: fields, options, limits, files, exit codes, and one line for what is wrong."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import simattn
from simattn import bench, cli, exact, iomodel, run, tiling
from simattn.bounds import error_bound
from simattn.cli import compare, softmax
from simattn.cli.problem import problem_of
from simattn.cli.rows import COUNTS, fitted, is_run
from simattn.dtypes import DTYPES, FLOAT32
from simattn.variants import VARIANTS

INTEGERS = (
    "hbm_read_elems", "hbm_write_elems", "hbm_read_bytes", "hbm_write_bytes", "peak_sram_bytes",
    "matmul_flops", "nonmatmul_flops", "exp_count",
)  # fmt: skip
SMALL = ("--n", "8", "--d", "4")
NOT_PREDICTED = (
    "as_predicted", "differences", "max_abs_error", "tolerance", "max_abs_lse_error",
    "lse_tolerance",
)  # fmt: skip


def call(*argv: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of a command line, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(argv))
    return code, out.getvalue(), err.getvalue()


def rows_of(*argv: str, code: int = 0) -> list[dict]:
    got, out, err = call(*argv, "--format", "json")
    assert (got, err if code == 0 else "") == (code, ""), err
    return json.loads(out, parse_constant=pytest.fail)


def row_of(*argv: str, code: int = 0) -> dict:
    (row,) = (row for row in rows_of(*argv, code=code) if row["tiling"] == "tiled")
    return row


def assert_refused(*argv: str, naming: str) -> str:
    """Exit code 2, nothing on standard output, one line on standard error that has ``naming``."""
    code, out, err = call(*argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert err.startswith("python -m simattn")
    assert naming in err
    return err


@pytest.fixture
def npz(tmp_path):
    """Saves arrays, and returns the file's path."""

    def save(name="input.npz", **arrays) -> str:
        np.savez(tmp_path / name, **arrays)
        return str(tmp_path / name)

    return save


def normal(*shape: int, seed: int = 0, dtype="f4") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# compare: rows and fields


def test_a_row_for_every_variant_tiled_then_untiled():
    rows = rows_of(*SMALL)
    names = [(row["variant"], row["tiling"]) for row in rows]
    assert names == [(v, how) for how in ("tiled", "untiled") for v in VARIANTS]
    assert all((row["block_q"], row["block_k"]) == (8, 8) for row in rows[:9])  # clamped
    assert all((row["block_q"], row["block_k"]) == (1, 1) for row in rows[9:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [(), ("--causal",), ("--window", "2,1"), ("--causal", "--lse")])
def test_fields_and_their_types_and_counted_equals_predicted(dtype, mask):
    shape = ("--n", "9", "--n-k", "11", "--d", "5", "--dv", "3", "--heads", "4", "--kv-heads", "2")
    for row in rows_of(*shape, "--batch", "2", "--block-q", "4", "--block-k", "3",
                       "--dtype", dtype, *mask):  # fmt: skip
        assert row["counted"] is True
        assert row["as_predicted"] is True
        for name in INTEGERS:
            assert type(row[name]) is int
            assert row[name] == row["predicted_" + name.removeprefix("hbm_")]
        for side in ("read", "write"):
            assert row[f"{side}s"] == row[f"predicted_{side}s"]
            assert all(type(elems) is int for elems in row[f"{side}s"].values())
            assert sum(row[f"{side}s"].values()) == row[f"hbm_{side}_elems"]
        assert type(row["block_q"]) is type(row["block_k"]) is int
        assert 0 <= row["max_abs_error"] <= row["tolerance"]
        assert ("L" in row["writes"]) == ("--lse" in mask)
        if "--lse" in mask:
            assert 0 <= row["max_abs_lse_error"] <= row["lse_tolerance"]
        else:
            assert row["max_abs_lse_error"] is None
        assert row["flagged"] is None
        assert row["fits"] is True


def test_counts_are_those_of_the_accounting_page():
    row = row_of("--variant", "q_outer", "--n", "128", "--d", "16")
    assert row["hbm_read_elems"] == 128 * 16 + 2 * 128 * (16 + 16)  # nd + Tr s (d + e), Tr = 2
    assert row["hbm_write_elems"] == 128 * 16
    assert row["hbm_read_bytes"] == 4 * row["hbm_read_elems"]
    assert row["reads"] == {"Q": 2048, "K": 4096, "V": 4096}


def test_counts_are_totals_over_batch_and_query_heads():
    one = row_of(*SMALL, "--variant", "kv_outer")
    many = row_of(*SMALL, "--variant", "kv_outer", "--heads", "4", "--kv-heads", "2", "--batch",
                  "3")  # fmt: skip
    for name in INTEGERS:
        times = 1 if name == "peak_sram_bytes" else 12
        assert many[name] == times * one[name]


def test_total_against_the_best_row():
    rows = rows_of(*SMALL)
    totals = [row["hbm_read_bytes"] + row["hbm_write_bytes"] for row in rows]
    assert [row["total_vs_best"] for row in rows] == [total / min(totals) for total in totals]
    assert min(row["total_vs_best"] for row in rows) == 1


def test_error_is_the_distance_to_the_oracle_on_the_input_of_the_seed():
    row = row_of(*SMALL, "--variant", "q_outer", "--seed", "7", "--dtype", "bfloat16")
    rng = np.random.default_rng(7)
    q, k, v = (DTYPES["bfloat16"].round(rng.standard_normal((1, 1, 8, 4))) for _ in "qkv")
    out = simattn.attention(q, k, v, dtype="bfloat16").out
    assert row["max_abs_error"] == np.abs(out - exact.attention(q, k, v)[0]).max() > 0
    assert (
        row["max_abs_error"]
        != row_of(*SMALL, "--variant", "q_outer", "--dtype", "bfloat16")["max_abs_error"]
    )


def test_compare_is_the_default_and_runs_at_1024():
    assert call("--n", "16") == call("compare", "--n", "16")
    rows = rows_of()
    assert len(rows) == 18
    for row in rows:
        assert row["counted"] is (row["tiling"] == "tiled")
        assert row["predicted_reads"]["Q"] % (1024 * 64) == 0
    tiled = [row for row in rows if row["tiling"] == "tiled"]
    assert all((row["block_q"], row["block_k"]) == (64, 64) for row in tiled)
    for row in rows[9:]:  # 2^20 pairs of rows: too many to run one by one
        assert all(row[name] is None for name in (*INTEGERS, "reads", "writes", "max_abs_error"))
        assert row["predicted_read_elems"] == sum(row["predicted_reads"].values()) > 0
        want = simattn.predict(row["variant"], n=1024, d=64, block_q=1, block_k=1)
        assert row["predicted_peak_sram_bytes"] == want.peak_sram_bytes


def test_a_repeated_variant_is_shown_once_and_order_is_kept():
    rows = rows_of(*SMALL, "--variant", "two_pass", "--variant", "q_outer", "--variant", "two_pass")
    assert [row["variant"] for row in rows] == ["two_pass", "q_outer"] * 2


@pytest.mark.parametrize(
    ("splits", "used"), [((), 4), (("--splits", "2"), 2), (("--splits", "99"), 8)]
)
def test_splits(splits, used):
    tiled, untiled = rows_of(*SMALL, "--variant", "split_kv", *splits)
    assert (tiled["splits"], untiled["splits"]) == (1, used)
    assert untiled["reads"]["O_part"] == used * 8 * 4


@pytest.mark.parametrize("text", ["-1,2", "2,-1", "0,0", "-1,-1", "3,1"])
def test_window(text):
    left, right = map(int, text.split(","))
    want = simattn.predict("q_outer", n=8, d=4, block_q=2, block_k=2, window_size=(left, right))
    argv = (*SMALL, "--variant", "q_outer", "--block-q", "2", "--block-k", "2")
    assert row_of(*argv, "--window", text)["reads"] == want.traffic.reads
    assert row_of(*argv, f"--window={text}") == row_of(*argv, "--window", text)


@pytest.mark.parametrize("scale", ["0", "1", "-2.5", "-1e-3", ".5"])
def test_scale(scale):
    assert row_of(*SMALL, "--variant", "q_outer", "--scale", scale)["as_predicted"] is True
    assert f"scale {float(scale):.6g}" in call(*SMALL, "--scale", scale)[1]


# compare: tiles and SRAM


def test_one_block_alone_and_the_planner_picks_the_other():
    rows = rows_of("--n", "100", "--d", "4", "--block-q", "10", "--variant", "q_outer")
    best = tiling.best("q_outer", None, n=100, d=4, block_q=10)
    assert (rows[0]["block_q"], rows[0]["block_k"]) == (best.block_q, best.block_k) == (10, 100)


@pytest.mark.parametrize("command", ["compare", "predict"])
def test_sram_alone_takes_the_planners_tiles(command):
    rows = rows_of(command, "--n", "40", "--d", "16", "--sram", "6KB")
    for row in rows[:9]:
        best = tiling.best(row["variant"], 6000, n=40, d=16)
        assert (row["block_q"], row["block_k"]) == (best.block_q, best.block_k)
        assert row["predicted_peak_sram_bytes"] == best.counts.peak_sram_bytes <= 6000
    assert len({(row["block_q"], row["block_k"]) for row in rows[:9]}) > 1


@pytest.mark.parametrize("text", ["1536", "1536B", "1.5KiB", "1.5 kib", "1.536KB", "0.001536MB"])
def test_memory_sizes(text):
    assert "SRAM 1,536 bytes" in call("predict", *SMALL, "--sram", text)[1]


def test_blocks_with_sram_are_taken_as_given_and_capacity_is_enforced():
    argv = ("--n", "64", "--d", "16", "--block-q", "32", "--block-k", "48", "--variant", "q_outer")
    need = row_of(*argv)["peak_sram_bytes"]
    fits = row_of(*argv, "--sram", str(need))
    assert (fits["block_q"], fits["block_k"], fits["peak_sram_bytes"]) == (32, 48, need)
    short = row_of(*argv, "--sram", str(need - 1))
    assert (short["block_q"], short["block_k"]) == (32, 48)
    assert (short["fits"], short["counted"], short["smallest_sram_bytes"]) == (False, False, need)


def test_the_simulator_is_held_to_the_capacity(monkeypatch):
    attention, capacities = run.attention, []

    def spy(*args, **options):
        capacities.append(options["sram_bytes"])
        return attention(*args, **options)

    monkeypatch.setattr(run, "attention", spy)
    call(*SMALL, "--variant", "q_outer", "--sram", "4KB")
    call(*SMALL, "--variant", "q_outer")
    assert capacities == [4000, 4000, None, None]


def test_a_variant_that_does_not_fit_has_null_counts_and_the_smallest_budget_that_works():
    argv = ("--n", "24", "--d", "16")
    for row in rows_of(*argv, "--sram", "600"):
        if row["fits"]:
            assert row["counted"] is True
            assert row["peak_sram_bytes"] <= 600
            assert row["smallest_sram_bytes"] is None
            continue
        assert all(row[name] is None for name in (*INTEGERS, "reads", "writes", "max_abs_error"))
        assert row["predicted_read_elems"] is None
        assert row["total_vs_best"] is None
        least, of = row["smallest_sram_bytes"], ("--variant", row["variant"])
        at = {r["tiling"]: r for r in rows_of(*argv, *of, "--sram", str(least))}
        assert at[row["tiling"]]["peak_sram_bytes"] == least
        code = 2 if row["tiling"] == "untiled" else 0
        below = {r["tiling"]: r for r in rows_of(*argv, *of, "--sram", str(least - 1), code=code)}
        assert below[row["tiling"]]["fits"] is False


def test_nothing_fits():
    code, out, err = call("--n", "64", "--sram", "100", "--format", "json")
    assert code == 2
    rows = json.loads(out)
    least = min(row["smallest_sram_bytes"] for row in rows)
    assert not any(row["fits"] for row in rows)
    assert f"--sram 100: fits no variant, must be at least {least} bytes" in err
    assert err.count("\n") == 1


# Limits of what is run


def would_run(*argv: str, variant: str = "q_outer", how: str = "tiled") -> bool:
    problem = problem_of(cli.parser().parse_args(["compare", *argv]))
    return is_run(problem, fitted(problem, variant, how, 1, 1, None))


def test_untiled_runs_up_to_2_18_pairs_of_rows():
    assert would_run("--n", "512", how="untiled")
    assert not would_run("--n", "512", "--n-k", "513", how="untiled")
    assert would_run("--n", "128", "--heads", "8", "--batch", "2", how="untiled")
    assert not would_run("--n", "128", "--heads", "8", "--batch", "3", how="untiled")
    assert would_run("--n", "513")


def test_tiled_runs_up_to_2_31_input_elements():
    assert would_run("--n", "4096", "--n-k", str(2**24 - 2048))  # 64 (n + 2 s) = 2^31
    assert not would_run("--n", "4097", "--n-k", str(2**24 - 2048))
    rows = rows_of("--n", "1", "--n-k", str(2**24), "--variant", "q_outer")
    assert [(row["counted"], row["max_abs_error"]) for row in rows] == [(False, None)] * 2
    assert rows[0]["predicted_reads"] == {"Q": 64, "K": 2**30, "V": 2**30}


def test_stored_scores_count_towards_the_limit():
    assert would_run("--n", "32768", variant="standard_safe")
    assert not would_run("--n", "32769", variant="standard_safe")
    assert would_run("--n", "32769", variant="q_outer")


def test_rows_that_were_only_predicted_are_marked():
    code, out, _ = call("--n", "513", "--d", "1", "--variant", "q_outer")
    tiled, untiled = (line for line in out.splitlines() if line.startswith("q_outer"))
    assert code == 0
    assert "predicted" not in tiled
    assert untiled.endswith("predicted")
    assert "Rows run: 1; of which every count equals its closed form: 1." in out


def test_a_file_without_query_heads(npz):
    x = np.zeros((0, 4, 3), np.float32)
    rows = rows_of("--input", npz(q=x, k=x, v=x), "--variant", "q_outer")
    assert all(row["counted"] and row["hbm_read_elems"] == 0 for row in rows)


# Exit code 1


def test_a_wrong_closed_form_is_exit_code_1(monkeypatch):
    right = iomodel.FORMS["q_outer"]

    def wrong(bill, x):
        right(bill, x)
        bill.load("Q", 1)

    monkeypatch.setitem(iomodel.FORMS, "q_outer", wrong)
    code, out, err = call(*SMALL, "--variant", "q_outer", "--variant", "two_pass")
    assert code == 1
    assert err.count("\n") == 1
    for tiling_, counted in (("tiled", 32), ("untiled", 32)):
        assert (f"q_outer {tiling_}: counts differ from the closed form (sram write_bytes: ") in err
        assert f"traffic reads Q: counted {counted}, predicted {counted + 1}" in err
    assert out.count("counts differ from the closed form") == 2


def test_an_error_above_its_bound_is_exit_code_1(monkeypatch):
    monkeypatch.setattr(compare, "error_bound", lambda *_, **__: (1e-12, 1.0))
    code, _, err = call(*SMALL, "--variant", "q_outer", "--lse")
    assert code == 1
    assert re.search(r"q_outer tiled: error \d.*e-\d+ is above 1e-12", err)
    monkeypatch.setattr(compare, "error_bound", lambda *_, **__: (1.0, 1e-12))
    assert call(*SMALL, "--variant", "q_outer")[0] == 0
    code, _, err = call(*SMALL, "--variant", "q_outer", "--lse")
    assert code == 1
    assert "lse_error" in err


def test_a_nan_is_an_error(monkeypatch):
    attention = run.attention

    def broken(*args, **options):
        done = attention(*args, **options)
        out = done.out.copy()
        out[..., 0, 0] = np.nan
        return dataclasses.replace(done, out=out)

    monkeypatch.setattr(run, "attention", broken)
    row = row_of(*SMALL, "--variant", "q_outer", code=1)
    assert row["max_abs_error"] is None
    assert row["as_predicted"] is True


# Files


@pytest.mark.parametrize("lead", [(), (2,), (3, 2)])
def test_input_of_two_to_four_dimensions(npz, lead):
    q, k, v = normal(*lead, 6, 4), normal(*lead, 9, 4, seed=1), normal(*lead, 9, 5, seed=2)
    row = row_of("--input", npz(q=q, k=k, v=v), "--variant", "q_outer")
    out = simattn.attention(q, k, v).out
    assert row["max_abs_error"] == np.abs(out - exact.attention(q, k, v)[0]).max()
    assert row["reads"]["V"] == math.prod(lead) * 9 * 5


def test_input_with_fewer_key_heads_at_large_logits(npz):
    q, k, v = 30 * normal(2, 4, 6, 4), 30 * normal(2, 2, 7, 4, seed=1), normal(2, 2, 7, 4, seed=2)
    path = npz(q=q, k=k, v=v)
    assert all(row["as_predicted"] for row in rows_of("--input", path, "--causal", "--lse"))
    assert "n 6, n_k 7, d 4, dv 4, heads 4, kv_heads 2, batch 2" in call("--input", path)[1]


def test_the_files_dtype_rules_unless_one_is_asked_for(npz):
    x = normal(8, 4, dtype="f2")
    path, of = npz(q=x, k=x, v=x), ("--variant", "q_outer")
    assert row_of("--input", path, *of)["hbm_read_bytes"] == 2 * 3 * 8 * 4
    assert row_of("--input", path, *of, "--dtype", "float64")["hbm_read_bytes"] == 8 * 3 * 8 * 4
    big_endian = npz("big.npz", q=x.astype(">f4"), k=x.astype(">f4"), v=x.astype(">f4"))
    assert row_of("--input", big_endian, *of)["hbm_read_bytes"] == 4 * 3 * 8 * 4


@pytest.mark.parametrize(("n", "s"), [(0, 3), (3, 0), (0, 0)])
def test_no_rows_or_no_keys_are_defined(npz, n, s):
    path = npz(q=normal(n, 4), k=normal(s, 4), v=normal(s, 4))
    for command in ("compare", "predict"):
        assert len(rows_of(command, "--input", path, "--lse")) == 18
    assert all(row["max_abs_error"] == 0 for row in rows_of("--input", path, "--lse"))
    assert len(rows_of("plan", "--input", path, "--sram", "1MiB")) == 6


def test_scores_that_overflow_float16_are_flagged_and_not_failed(npz):
    q, k = np.array([[300.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 1.0], [300.0, 0.0]])
    path = npz(q=q, k=k, v=np.ones((2, 2)))
    argv = ("--input", path, "--dtype", "float16", "--scale", "1")
    for row in rows_of(*argv):
        overflows = row["variant"].startswith("standard")
        assert row["flagged"] == ("scores overflow float16" if overflows else None)
        assert row["as_predicted"] is True
        assert row["max_abs_error"] == (None if overflows else 0)  # NaN, or exact
    # The one score beyond 65504, of query 0 and key 1, is hidden from a causal row.
    assert all(row["flagged"] is None for row in rows_of(*argv, "--causal"))
    assert all(row["flagged"] is None for row in rows_of(*argv[:2], "--scale", "1"))


def write(path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_files_that_are_not_what_they_should_be(npz, tmp_path):
    x = normal(4, 3)
    np.save(tmp_path / "one.npy", x)
    whole = (tmp_path / npz("whole.npz", q=x, k=x, v=x)).read_bytes()
    for path, reason in (
        (str(tmp_path / "none.npz"), "No such file or directory"),
        (str(tmp_path), "Is a directory"),
        (str(tmp_path / "one.npy"), "a single array without a name"),
        (write(tmp_path / "empty.npz", b""), "must be a readable .npz"),
        (write(tmp_path / "text.npz", b"hello, world\n"), "must be a readable .npz"),
        (write(tmp_path / "cut.npz", whole[:-40]), "must be a readable .npz"),
        (write(tmp_path / "bad.npz", whole[:150] + b"\0" * 9 + whole[159:]), "must be a readable"),
        (npz("objects.npz", q=np.array([[None]]), k=x, v=x), "must be a readable .npz"),
    ):
        for command in ("compare", "softmax", "predict"):
            assert reason in assert_refused(command, "--input", path, naming=f"--input {path}: ")


def test_arrays_that_are_not_what_they_should_be(npz):
    x = normal(4, 3)
    for arrays, rule in (
        ({"q": x, "k": x}, "has no array v, must hold q, k, v"),
        ({}, "has no array q"),
        ({"q": x[0], "k": x, "v": x}, "q (3,) must be (rows, width), (heads, rows, width) or"),
        ({"q": x, "k": x, "v": x[None, None, None]}, "v (1, 1, 1, 4, 3) must be (rows, width)"),
        ({"q": x[None], "k": x, "v": x}, "must have equally many dimensions"),
        ({"q": x, "k": x[:, :2], "v": x}, "q and k must have the same width"),
        ({"q": x, "k": x, "v": x[:3]}, "k and v must have the same heads and rows"),
        ({"q": x[:, :0], "k": x[:, :0], "v": x}, "no width may be 0"),
        ({"q": np.stack([x] * 3), "k": np.stack([x] * 2), "v": np.stack([x] * 2)},
         "the 2 heads of k must divide the 3 of q"),
        ({"q": x.astype(int), "k": x, "v": x}, "q has dtype int64: must be one of float16"),
        ({"q": x, "k": x, "v": x.astype(complex)}, "v has dtype complex128"),
        ({"q": x, "k": x.astype(bool), "v": x}, "k has dtype bool"),
        ({"q": x, "k": x.astype("U9"), "v": x}, "k has dtype str"),
        ({"q": x, "k": x.astype("f2"), "v": x}, "q float32, k float16, v float32: must have one"),
        ({"q": x, "k": x, "v": np.where(x > 0, np.nan, x)}, "v holds "),
        ({"q": x, "k": np.where(x == x[1, 1], np.inf, x), "v": x}, "k holds 1 NaN or infinite"),
    ):  # fmt: skip
        path = npz(**arrays)
        assert rule in assert_refused("--input", path, naming=f"--input {path}: ")
        assert rule in assert_refused("plan", "--sram", "9KB", "--input", path, naming=path)
    path = npz(q=x, k=np.full((4, 3), -1e6), v=x)
    assert_refused("--input", path, "--dtype", "float16", naming="--dtype float16: 12 values of k")


# Bad input on the command line


@pytest.mark.parametrize(
    ("argv", "naming"),
    [
        ("--n 0", "--n: '0' must be a whole number, at least 1"),
        ("--n -3", "--n: '-3' must be a whole number"),
        ("--n 1.5", "--n: '1.5' must be a whole number"),
        ("--n 1e3", "--n: '1e3' must be a whole number"),
        ("--n 1_000", "--n: '1_000' must be a whole number"),
        ("--n ٣", "must be a whole number"),
        ("--n", "--n: expected one argument"),
        ("--n-k 0", "--n-k: '0'"),
        ("--d 0", "--d: '0'"),
        ("--dv 0", "--dv: '0'"),
        ("--heads 0", "--heads: '0'"),
        ("--kv-heads x", "--kv-heads: 'x'"),
        ("--batch 0", "--batch: '0'"),
        ("--heads 4 --kv-heads 3", "--kv-heads 3: must divide --heads 4"),
        (f"--n {2**48 + 1}", f"must be at most {2**48}"),
        (f"predict --n-k {2**48 + 1}", f"must be at most {2**48}"),
        (f"--n {'9' * 2000}", "must be a whole number"),
        ("--block-q 0", "--block-q: '0' must be a whole number, at least 1"),
        ("--block-k -1", "--block-k: '-1' must be a whole number, at least 1"),
        ("--splits 0", "--splits: '0'"),
        ("--seed -1", "--seed: '-1' must be a whole number, at least 0"),
        ("--sram 10QB", "'10QB' has the unit QB, must be one of B, KiB, MiB, GiB, KB, MB"),
        ("--sram 0", "--sram: '0' must be a whole number of bytes"),
        ("--sram -5KB", "--sram: '-5KB' must be a whole number of bytes"),
        ("--sram 0.3KiB", "--sram: '0.3KiB' must be a whole number of bytes"),
        ("--sram lots", "--sram: 'lots' must be a whole number of bytes"),
        ("--sram 1e5", "--sram: '1e5' must be a whole number of bytes"),
        ("--window 1", "--window: '1' must be LEFT,RIGHT"),
        ("--window -2,0", "--window: '-2,0' must be LEFT,RIGHT: two whole numbers, each at least"),
        ("--window 1,2,3", "--window: '1,2,3' must be LEFT,RIGHT"),
        ("--scale nan", "--scale: 'nan' must be a finite number"),
        ("--scale -inf", "--scale: '-inf' must be a finite number"),
        ("--scale x", "--scale: 'x' must be a finite number"),
        ("--dtype int8", "--dtype: invalid choice: 'int8'"),
        ("--variant flash", "--variant: invalid choice: 'flash'"),
        ("--format yaml", "--format: invalid choice: 'yaml'"),
        ("--causal=3", "--causal: ignored explicit argument '3'"),
        ("--nn 3", "unrecognized arguments: --nn 3"),
        ("--he 3", "unrecognized arguments: --he 3"),
        ("compare 3", "unrecognized arguments: 3"),
        ("train", "invalid choice: 'train'"),
        ("plan --n 8", "one of the arguments --sram --device is required"),
        ("plan --n 8 --sram 1KB --granule 0", "--granule: '0'"),
        ("softmax --n 8 --variant fast", "--variant: invalid choice: 'fast'"),
        ("softmax --n 8 --scale 1e9 --dtype float16", "--scale 1e+09: 64 scores are beyond"),
        ("sweep --over n --values 8,x", "--values 8,x: 'x' must be a whole number"),
        ("sweep --over sram --values 8,9QB", "--values 8,9QB: '9QB' has the unit QB"),
        ("sweep --over n --values 8 --n 9", "--n 9: not with --over n"),
        ("sweep --over block --values 8 --block-k 9", "--block-k 9: not with --over block"),
        ("sweep --over d --values 8", "--over: invalid choice: 'd'"),
        ("bench --n 100000000", "--n 100000000: makes arrays of"),
        ("bench --repeat 0", "--repeat: '0'"),
    ],
)  # fmt: skip
def test_bad_arguments(argv, naming):
    assert_refused(*argv.split(), naming=naming)


@pytest.mark.parametrize(
    ("command", "sizes"),
    [
        ("compare", "n n-k d dv heads kv-heads batch"),
        ("plan --sram 1MB", "n"),
        ("softmax", "n n-k"),
    ],
)
def test_sizes_and_a_file_exclude_each_other(npz, command, sizes):
    x = normal(4, 3)
    path = npz(q=x, k=x, v=x)
    for size in sizes.split():
        argv = (*command.split(), "--input", path, f"--{size}", "4")
        assert_refused(*argv, naming=f"--{size} 4: not with --input")


def test_whatever_a_value_holds_the_complaint_is_one_line():
    assert_refused("--input", "no\nsuch\rfile", naming="--input no such file: ")
    assert_refused("--n", "1\n2", naming=r"'1\n2'")


def test_a_lack_of_memory_is_one_line(monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(exact, "attention", fail)
    assert_refused(*SMALL, naming="must be small enough for this memory")


# predict


@pytest.mark.parametrize(
    "argv",
    [(), ("--causal", "--lse"), ("--window", "3,0", "--heads", "2", "--dtype", "float16"),
     ("--sram", "9KB"), ("--sram", "300"), ("--block-q", "5")],
)  # fmt: skip
def test_predict_has_the_fields_of_compare_with_the_counted_ones_null(argv):
    shape = ("--n", "20", "--d", "8")
    for row, counted in zip(rows_of("predict", *shape, *argv), rows_of(*shape, *argv), strict=True):
        assert row.keys() == counted.keys()
        for name, value in row.items():
            if name == "counted":
                assert value is False
            elif name in (*COUNTS, *NOT_PREDICTED):
                assert value is None
            else:
                assert value == counted[name]


def test_predict_is_instant_at_any_size():
    start = time.process_time()
    rows = rows_of("predict", "--n", "10000000", "--causal")
    rows += rows_of("predict", "--n", str(2**48), "--window", "5,7")
    assert time.process_time() - start < 1
    n = 10_000_000
    assert rows[4]["predicted_writes"] == {"O": n * 64}
    tiles = n // 64
    assert rows[4]["predicted_reads"]["K"] == 64 * 64 * tiles * (tiles + 1) // 2


# softmax


def test_softmax_shows_accesses_an_element():
    rows = rows_of("softmax", "--n", "20", "--n-k", "30")
    got = {row["variant"]: row["accesses_per_element"] for row in rows}
    assert got == {"naive": 3, "safe": 4, "online": 3, "row": 2}
    for row in rows:
        assert row["as_predicted"] is True
        assert row["max_abs_error"] <= row["tolerance"] < 1e-4
        assert row["flagged"] is None
        assert row["writes"] == {"P": 600}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", ["1", "150"])
def test_a_naive_softmax_that_overflows_is_flagged_and_not_failed(dtype, scale):
    rows = rows_of("softmax", "--n", "20", "--n-k", "50", "--scale", scale, "--dtype", dtype)
    overflows = scale == "150" and dtype != "float64"  # whose exp reaches to 709, not to 88
    assert [row["variant"] for row in rows if row["flagged"]] == ["naive"] * overflows
    assert all(row["as_predicted"] for row in rows)


def test_only_naive_is_exempt_from_its_tolerance(monkeypatch):
    monkeypatch.setattr(softmax, "error_bound", lambda *_, **__: (1e-12, 1.0))
    code, out, err = call("softmax", "--n", "20", "--format", "json")
    assert code == 1
    assert [row["variant"] for row in json.loads(out) if row["flagged"]] == ["naive"]
    assert re.findall(r"(\w+) tiled: error \S+ is above 1e-12", err) == ["safe", "online", "row"]


def test_a_naive_softmax_that_underflows_is_flagged(npz):
    rows = rows_of("softmax", "--input", npz(x=np.full((2, 3), -200, "f4")))
    assert rows[0]["flagged"] == "exp over- or underflows: 2 of 2 rows wrong"
    assert rows[0]["max_abs_error"] == pytest.approx(1 / 3)


def test_softmax_of_a_file(npz):
    q, k = normal(2, 4, 6, 3), normal(2, 2, 5, 3, seed=1)
    row = rows_of("softmax", "--input", npz(q=q, k=k), "--variant", "safe")[0]
    scores = np.einsum("bhid,bhjd->bhij", q.astype("f8"), np.repeat(k, 2, axis=1)) / math.sqrt(3)
    x = scores.reshape(-1, 5).astype("f4")
    want = np.exp(x.astype("f8")) / np.exp(x.astype("f8")).sum(axis=1, keepdims=True)
    done = simattn.row_softmax(x, algorithm="safe", block_q=64, block_k=64)
    assert row["reads"] == {"S": 3 * 48 * 5}
    assert row["max_abs_error"] == pytest.approx(np.abs(done.out - want).max(), abs=1e-12)
    by_x = rows_of("softmax", "--input", npz("x.npz", x=x), "--variant", "safe")[0]
    assert by_x == row
    for arrays, rule in (
        ({"x": x[0]}, "x (5,) must be (rows, columns)"),
        ({"x": x.astype(int)}, "x has dtype int64"),
        ({"x": x * np.inf}, "x holds 240 NaN or infinite values"),
        ({"q": q}, "has no array k, must hold q, k"),
        ({"y": q}, "has no array q, must hold q, k"),
    ):
        path = npz("bad.npz", **arrays)
        assert rule in assert_refused("softmax", "--input", path, naming=f"--input {path}: ")


def test_softmax_that_is_too_large_is_predicted():
    rows = rows_of("softmax", "--n", str(2**16), "--n-k", str(2**16))
    assert [row["counted"] for row in rows] == [False] * 4
    assert rows[1]["predicted_read_elems"] == 3 * 2**32


# plan


def test_plan_shows_the_tiles_of_three_rules():
    rows = rows_of("plan", "--sram", "100KB", "--n", "4096")
    assert [(row["variant"], row["rule"]) for row in rows] == [
        (variant, rule) for variant in ("q_outer", "kv_outer") for rule in ("seed", "paper", "best")
    ]
    for row in rows:
        assert row["compulsory_bytes"] == 4 * 4 * 4096 * 64
        total = row["predicted_read_bytes"] + row["predicted_write_bytes"]
        assert row["total_vs_compulsory"] == total / row["compulsory_bytes"]
        assert row["fits"] is (row["predicted_peak_sram_bytes"] <= 100_000)
    tiles = {(row["variant"], row["rule"]): (row["block_q"], row["block_k"]) for row in rows}
    assert tiles["q_outer", "seed"] == (98, 64)  # ceil(25000 / 256), min(98, 64)
    assert tiles["q_outer", "paper"] == (64, 98)
    assert tiles["q_outer", "best"] == (144, 16)
    assert rows[0]["fits"] is False
    assert rows[2]["fits"] is True


def test_plan_takes_variants_and_a_granule():
    rows = rows_of("plan", "--sram", "64KiB", "--n", "512", "--variant", "two_pass", "--granule",
                   "32")  # fmt: skip
    best = tiling.best("two_pass", 65536, n=512, d=64, granule=32)
    assert (rows[2]["block_q"], rows[2]["block_k"]) == (best.block_q, best.block_k)
    assert rows[2]["block_q"] % 32 == 0


def test_plan_without_tiles_that_fit():
    code, out, err = call("plan", "--sram", "9KB", "--n", "64", "--format", "json")
    least = tiling.smallest_budget("q_outer", n=64, d=64)
    best = [row for row in json.loads(out) if row["rule"] == "best"]
    assert code == 2
    assert err == (
        f"python -m simattn plan: --sram 9000: fits no tiles, must be at least {least} bytes\n"
    )
    assert [(row["block_q"], row["fits"], row["smallest_sram_bytes"]) for row in best] == [
        (None, False, least)
    ] * 2
    assert call("plan", "--sram", str(least), "--n", "64")[0] == 0
    assert call("plan", "--sram", str(least - 1), "--n", "64")[0] == 2


# sweep


@pytest.mark.parametrize(
    ("over", "values", "options"),
    [
        ("n", "64,100", [("--n", "64"), ("--n", "100")]),
        ("sram", "30KB,64KiB", [("--sram", "30000"), ("--sram", "65536")]),
        ("block", "8,16", [("--block-q", "8", "--block-k", "8"),
                           ("--block-q", "16", "--block-k", "16")]),
    ],
)  # fmt: skip
def test_sweep_is_predict_at_each_value(over, values, options):
    of = ("--variant", "q_outer", "--variant", "kv_outer", "--causal")
    rows = rows_of("sweep", "--over", over, "--values", values, *of)
    assert [row["over"] for row in rows] == [over] * 4
    assert len({row["value"] for row in rows}) == 2
    for row, option in zip(rows, [o for o in options for _ in range(2)], strict=True):
        want = row_of("predict", *option, "--variant", row["variant"], "--causal")
        same = row.keys() - {"over", "value", "total_vs_best"}
        assert {name: row[name] for name in same} == {name: want[name] for name in same}
    assert rows[0]["total_vs_best"] == rows[2]["total_vs_best"] == 1


def test_sweep_over_budgets_that_do_not_fit():
    rows = rows_of("sweep", "--over", "sram", "--values", "1KB,1MB", "--variant", "q_outer")
    assert [row["fits"] for row in rows] == [False, True]
    code, _, err = call("sweep", "--over", "sram", "--values", "1KB,2KB", "--variant", "q_outer")
    assert code == 2
    assert "--values 1KB,2KB: fits no variant, must be at least 17600 bytes" in err


# bench


def test_bench_times_three_loops_that_agree():
    rows = rows_of("bench", "--n", "32", "--heads", "2", "--block", "16", "--repeat", "3")
    assert [row["loop"] for row in rows] == ["counted", "uncounted", "plain"]
    for row in rows:
        assert 0 < row["min_s"] <= row["median_s"]
        assert row["min_speed_over_plain"] == rows[2]["min_s"] / row["min_s"]
        over = 100 * (row["min_s"] / rows[1]["min_s"] - 1)
        assert row["min_overhead_percent"] == pytest.approx(over)
    q, k, v = (normal(2, 40, 8, seed=seed) for seed in range(3))
    want = exact.attention(q, k, v)[0]
    bound, _ = error_bound(
        q, k, v, storage=FLOAT32, variant="q_outer", block_k=16, scale=1 / math.sqrt(8)
    )
    for loop in bench.LOOPS.values():
        assert np.abs(loop(q, k, v, 16) - want).max() <= bound


@pytest.mark.slow
def test_counting_costs_at_most_a_tenth_and_beats_plain_numpy():
    """At the size that the README shows, in CPU time, which a busy machine hardly lengthens."""
    for _ in range(4):
        rows = bench.bench(repeat=5)
        counted, uncounted, plain = (row["min_cpu_s"] for row in rows)
        if counted <= 1.1 * uncounted and counted < plain:
            return
    spread = max(row["median_s"] / row["min_s"] for row in rows)
    if spread > 1.1:
        pytest.skip(f"rounds of one loop differ by {spread:.2f}: a tenth cannot be told here, now")
    assert counted <= 1.1 * uncounted
    assert counted < plain


# Formats


def test_csv_has_the_numbers_of_json():
    argv = (*SMALL, "--lse", "--sram", "700")
    rows = rows_of(*argv)
    _, out, _ = call(*argv, "--format", "csv")
    for want, got in zip(rows, csv.DictReader(io.StringIO(out)), strict=True):
        for name, value in want.items():
            if isinstance(value, dict):
                cells = {k: v for k, v in got.items() if k.startswith(f"{name}.") and v}
                assert cells == {f"{name}.{tensor}": str(n) for tensor, n in value.items()}
            elif value is not None:
                text = str(value).lower() if isinstance(value, bool) else str(value)
                assert got[name] == text
            else:
                assert got.get(name, "") == ""


def test_text_states_the_problem_and_says_what_is_counted():
    code, out, err = call(*SMALL, "--causal", "--window", "3,-1", "--sram", "64KiB")
    assert (code, err) == (0, "")
    assert "n 8, n_k 8, d 4, dv 4, heads 1, kv_heads 1, batch 1" in out
    assert "float32, causal and window 3,-1, scale 0.5" in out
    assert "SRAM 65,536 bytes; input: random normal, seed 0" in out
    assert "traffic between L2 and the SMs" in out
    assert "Rows run: 18; of which every count equals its closed form: 18." in out
    assert out.isascii()
    (line,) = (line for line in out.splitlines() if re.match(r"q_outer +8 x 8", line))
    row = row_of(*SMALL, "--causal", "--window", "3,-1", "--sram", "64KiB", "--variant", "q_outer")
    for name in INTEGERS[:2] + INTEGERS[4:]:
        assert re.search(rf"\s{row[name]:,}(\s|$)", line)


def test_markdown_is_a_table():
    _, out, _ = call(*SMALL, "--format", "md", "--variant", "two_pass")
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert len({line.count("|") for line in table}) == 1


@pytest.mark.parametrize("command", ["compare", "softmax", "predict", "plan", "sweep", "bench"])
def test_help(command):
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    assert f"python -m simattn {command}" in out
    assert "--format" in out
    assert command in call("--help")[1]


def test_version():
    assert call("--version") == (0, f"simattn {simattn.__version__}\n", "")


# As a process

PYTHON = (sys.executable, "-m", "simattn")


def start(*argv: str, python=PYTHON, **options) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **options.pop("env", {})}
    return subprocess.Popen(
        [*python, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, **options
    )


def test_as_a_process():
    with start("--n", "0") as process:
        out, err = process.communicate()
    assert (process.returncode, out, err.count(b"\n")) == (2, b"", 1)
    with start(*SMALL, "--variant", "q_outer", "--format", "json") as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert [row["counted"] for row in json.loads(out)] == [True, True]


def test_interrupted():
    program = (
        "import signal, sys; from simattn.cli import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell may have it ignored
        "print('ready', flush=True); "
        "sys.exit(main(['--n', '500', '--variant', 'kv_outer']))"  # some 20 seconds, untiled
    )
    with start("-c", program, python=(sys.executable,)) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("argv", [("--n", "64"), ("compare", "--help")])
def test_a_reader_that_goes_away_leaves_no_trace(argv):
    with start(*argv) as process:
        process.stdout.close()
        process.wait()
        assert (process.returncode, process.stderr.read()) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PYTHON, *SMALL], stdout=full, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"standard output: must be writable" in done.stderr


def test_a_file_name_that_the_terminal_cannot_spell(tmp_path):
    x = normal(4, 3)
    np.savez(tmp_path / "naïve.npz", q=x, k=x, v=x)
    with start("--input", "naïve.npz", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"}) as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert rb"input: na\xefve.npz" in out


# Anything at all

sizes = st.sampled_from(["1", "2", "3", "6", "6", "5", "0", "-1", "x", "7.0", ""])
option = st.one_of(
    st.tuples(st.sampled_from(["--n", "--n-k", "--d", "--dv", "--heads", "--kv-heads", "--batch",
                               "--block-q", "--block-k", "--splits", "--seed"]), sizes),
    st.tuples(st.just("--sram"), st.sampled_from(["1", "300", "2KB", "1 MiB", "9TB", "-1", "1.5"])),
    st.tuples(st.just("--dtype"), st.sampled_from([*DTYPES, "int8"])),
    st.tuples(st.just("--scale"), st.sampled_from(["0", "-2", "1e-30", "40", "nan", "--n"])),
    st.tuples(st.just("--window"), st.sampled_from(["-1,0", "2,1", "0,-1", "-2,1", "1", "9,9"])),
    st.tuples(st.just("--variant"), st.sampled_from([*VARIANTS, "naive", "none"])),
    st.tuples(st.just("--over"), st.sampled_from(["n", "sram", "block"])),
    st.tuples(st.just("--values"), st.sampled_from(["1,2", "4,1KB", "", ",", "9"])),
    st.sampled_from([("--causal",), ("--lse",), ("--input", "none.npz"), ("extra",)]),
)  # fmt: skip
command = st.sampled_from(["", "", "compare", "predict", "plan", "sweep", "softmax", "none"])


@given(command, st.lists(option, max_size=5), st.sampled_from(["text", "md", "csv", "json"]))
@example("", [("--causal",), ("--n", "1"), ("--n-k", "6"), ("--window", "0,-1")], "json")
@example("sweep", [("--over", "n"), ("--values", "9")], "json")
def test_any_arguments_give_an_exit_code_and_never_a_traceback(name, options, form):
    defaults = ["--n", "5"] if name in ("", "compare", "softmax") else []
    argv = [*[name] * bool(name), *defaults, *(word for pair in options for word in pair)]
    code, out, err = call(*argv, "--format", form)
    assert code in (0, 2)
    assert err.count("\n") == (code == 2)
    if code == 0:
        assert out
    if out and form == "json":
        rows = json.loads(out, parse_constant=pytest.fail)
        assert all(row.get("as_predicted") is not False for row in rows)
        assert code == 2 or any(row["fits"] for row in rows)
