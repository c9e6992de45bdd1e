"""Our ``kernels`` and the PyPI project of that name: which one is imported, and who else looks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from simattn.clash import clash

ROOT = Path(__file__).parent.parent


def test_the_importable_kernels_is_ours() -> None:
    """If this fails, the distribution ``kernels`` overwrote or hides our package of the same name:
    uninstall it, install simattn again, and keep the two in separate environments."""
    assert clash() is None
    assert getattr(kernels, "DISTRIBUTION", None) == "simattn", kernels.__file__


def run_beside(folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Python with ``folder`` ahead of this project on its path, as if installed over it."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip


def test_the_other_kernels_is_detected_and_named(tmp_path: Path) -> None:
    package, metadata = tmp_path / "kernels", tmp_path / "kernels-0.17.2.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n")
    (metadata / "RECORD").write_text("kernels/__init__.py,,\n")
    done = run_beside(tmp_path, "-m", "simattn", "predict", "--n", "64")
    assert done.returncode == 0  # simattn itself does not need them
    assert done.stderr.count("\n") == 1
    assert f"the package kernels at {package / '__init__.py'} is not simattn's" in done.stderr
    assert "that of the distribution kernels: keep the two in separate environments" in done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers installed"
)
def test_transformers_imports_next_to_ours() -> None:
    """transformers asks whether a ``kernels`` of the other project's version is there."""
    code = (
        "import transformers, kernels\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "print(is_kernels_available(), kernels.flash_attention.__module__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["False", "kernels.launch"], done.stderr
