"""A kernel's modules, less one statement: what each barrier and wait is there for."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest


def statements(pattern: str, *modules: ModuleType) -> list:
    """(module, line number) of each line that the pattern matches, as pytest's parameters."""
    return [
        pytest.param(module, i, id=line.strip().split("#")[0])
        for module in modules
        for i, line in enumerate(_lines(module))
        if re.match(pattern, line)
    ]


def without(module: ModuleType, line: int, folder: Path) -> ModuleType:
    """A module of the kernel, less one statement."""
    name, lines = f"kernels.less_line_{line}", _lines(module)
    path = folder / f"less_line_{line}.py"
    indent = re.match(" *", lines[line]).group()
    path.write_text("\n".join([*lines[:line], f"{indent}pass", *lines[line + 1 :]]))
    spec = importlib.util.spec_from_file_location(name, path)
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[name] = mutant
    try:
        spec.loader.exec_module(mutant)
    finally:
        del sys.modules[name]
    return mutant


def _lines(module: ModuleType) -> list[str]:
    return Path(module.__file__).read_text().splitlines()
