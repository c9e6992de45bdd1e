"""Our ``kernels`` and the PyPI project of that name: which one is imported, and who else looks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import kernels

ROOT = Path(__file__).parent.parent


def test_the_importable_kernels_is_ours() -> None:
    """If this fails, the distribution ``kernels`` overwrote or hides our package of the same name:
    uninstall it, install simattn again, and keep the two in separate environments."""
    assert getattr(kernels, "DISTRIBUTION", None) == "simattn", kernels.__file__


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
