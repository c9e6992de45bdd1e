"""PTX on disk: whole or not there, and never another kernel's."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kernels import cache, compiled, driver
from kernels.compiled import Kernel
from kernels.mma_layout import layout_for

KERNEL = Kernel("mma", layout_for(64, 64), "float16")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMATTN_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_what_was_written_is_read(folder) -> None:
    assert cache.read("a") is None
    cache.write("a", b"code")
    assert cache.read("a") == b"code"
    cache.write("a", b"")
    assert cache.read("a") == b""
    assert cache.read("b") is None
    assert [x.name for x in folder.iterdir()] == ["a"]


@pytest.mark.parametrize("damage", [b"", b"x", b"\0" * 40])
def test_a_damaged_file_is_none(folder, damage) -> None:
    cache.write("a", b"code")
    (folder / "a").write_bytes(damage)
    assert cache.read("a") is None
    cache.write("a", b"code")
    assert cache.read("a") == b"code"


def test_a_file_cut_short_is_none(folder) -> None:
    cache.write("a", b"a long piece of code")
    whole = (folder / "a").read_bytes()
    for length in range(len(whole)):
        (folder / "a").write_bytes(whole[:length])
        assert cache.read("a") is None


def test_a_folder_that_cannot_be_had_only_means_compiling_again(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    for where in (str(tmp_path / "file" / "below"), "", "\0"):
        with monkeypatch.context() as patch:
            if "\0" in where:
                patch.setattr(cache, "folder", lambda: None)
            else:
                patch.setenv("SIMATTN_CACHE_DIR", where)
            cache.write("a", b"code")
            assert cache.read("a") is None


def test_the_folder_is_the_users(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("SIMATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "simattn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "simattn"


def test_many_writers_leave_one_whole_file(folder) -> None:
    contents = [bytes([i]) * 50_000 for i in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda x: cache.write("a", x), contents))
    assert cache.read("a") in contents
    assert len(list(folder.iterdir())) == 1


@pytest.fixture
def fake_compiler(monkeypatch, folder):
    """Counts what is compiled, without Numba and a GPU."""
    made = []
    limits = driver.Limits(0, 0, 0, (9, 0))
    monkeypatch.setattr(driver, "limits", lambda device: limits)
    monkeypatch.setattr(driver, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(driver, "load", lambda text, *rest: text)
    monkeypatch.setattr(compiled, "_built", {})

    def ptx(kernel, capability):
        made.append(kernel)
        text = repr((kernel, capability))
        cache.write(compiled._file(kernel, capability), text.encode())
        return text

    monkeypatch.setattr(compiled, "ptx", ptx)
    monkeypatch.setattr(compiled, "_versions", lambda: ("1",))
    return made


def new_process(monkeypatch) -> None:
    monkeypatch.setattr(compiled, "_built", {})


def test_a_kernel_is_compiled_once_for_all_processes(fake_compiler, monkeypatch, folder) -> None:
    first = compiled.load(KERNEL, 0)
    assert (first.from_disk, len(fake_compiler)) == (False, 1)
    assert compiled.load(KERNEL, 0) is first
    new_process(monkeypatch)
    second = compiled.load(KERNEL, 0)
    assert (second.from_disk, second.loaded, len(fake_compiler)) == (True, first.loaded, 1)

    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    new_process(monkeypatch)
    third = compiled.load(KERNEL, 0)
    assert (third.from_disk, third.loaded, len(fake_compiler)) == (False, first.loaded, 2)
    new_process(monkeypatch)
    assert compiled.load(KERNEL, 0).from_disk


@pytest.mark.parametrize("change", ["layout", "dtype", "variant", "device", "source"])
def test_what_the_code_depends_on_is_in_its_name(fake_compiler, monkeypatch, change) -> None:
    compiled.load(KERNEL, 0)
    new_process(monkeypatch)
    other = KERNEL
    match change:
        case "layout":
            other = replace(KERNEL, layout=replace(KERNEL.layout, block_k=32))
        case "dtype":
            other = replace(KERNEL, dtype="bfloat16")
        case "variant":
            other = replace(KERNEL, variant="other")
        case "device":
            monkeypatch.setattr(driver, "limits", lambda device: driver.Limits(0, 0, 0, (8, 0)))
        case "source":
            monkeypatch.setattr(compiled, "_versions", lambda: ("2",))
    assert not compiled.load(other, 0).from_disk
    assert len(fake_compiler) == 2


def test_threads_that_ask_together_compile_once(fake_compiler) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: compiled.load(KERNEL, 0), range(16)))
    assert len(fake_compiler) == 1
    assert all(x is found[0] for x in found)


def test_versions_name_the_compiler_and_the_source() -> None:
    pytest.importorskip("numba_cuda")
    *versions, _, digest = compiled._versions()
    assert len(versions) == len(compiled.COMPILER + compiled.TOOLKIT)
    assert all(versions[: len(compiled.COMPILER)])
    assert len(digest) == 64


def test_another_toolkit_is_another_file(monkeypatch) -> None:
    """PTX of CUDA 13 is none for a driver of CUDA 12, whose user then installs cu12."""
    pytest.importorskip("numba_cuda")
    honest, names = compiled._version, set()
    for toolkit in ({"nvidia-nvvm": "13.0.88"}, {"nvidia-cuda-nvcc-cu12": "12.9.86"}, {}):
        fake = {name: toolkit.get(name, "") for name in compiled.TOOLKIT}
        monkeypatch.setattr(compiled, "_version", fake.__getitem__)
        names.add(compiled._versions.__wrapped__())
    assert len(names) == 3
    assert honest("no-such-distribution") == ""
