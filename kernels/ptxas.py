"""What the assembler makes of a kernel, without a GPU: registers, stack, spills, instructions.

    python -m kernels.ptxas            # flash_mma's tile shapes, both targets
    python -m kernels.ptxas --quick    # a width of each row of its table

Exit code 1 if one spills.

Needs Numba and the CUDA compiler's wheels (extra ``cu13``), no GPU and no driver.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS: dict[str, tuple[Any, ...]] = {"sm_80": (8, 0), "sm_90a": (9, 0, "a")}


@dataclass(frozen=True, slots=True)
class Assembled:
    """One kernel for one target."""

    target: str
    registers: int  # a thread
    stack_bytes: int
    spill_bytes: int  # stores and loads
    instructions: Counter[str]  # PTX mnemonics up to the first dot or two: ``mma.sync``
    seconds: float

    @property
    def clean(self) -> bool:
        """Nothing of a thread lives in memory."""
        return self.stack_bytes == self.spill_bytes == 0


@functools.cache
def find_ptxas() -> Path | None:
    """The assembler: of the CUDA wheels beside Numba, else on the path."""
    import importlib.util

    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations if nvidia else []:
        for found in sorted(Path(folder).glob("*/bin/ptxas*")):
            return found
    on_path = shutil.which("ptxas")
    return Path(on_path) if on_path else None


def assemble(
    kernel: Callable[..., Any], signature: Any, target: str, *, threads: int, min_blocks: int = 1
) -> Assembled:
    """Compile a kernel for ``sm_80`` or ``sm_90a`` and read the assembler's report.

    Raises
    ------
    RuntimeError
        Without ptxas, or if it refuses the kernel.
    """
    from ._cuda import cuda

    start = time.perf_counter()
    text, _ = cuda.compile(
        kernel, signature, device=False, abi="numba", cc=TARGETS[target], output="ptx",
        launch_bounds=(threads, min_blocks),
    )  # fmt: skip
    ptxas = find_ptxas()
    if ptxas is None:
        raise RuntimeError("ptxas was not found: pip install '.[cu13]'")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(text)
        command = [ptxas, f"-arch={target}", "-v", source, "-o", Path(folder, "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr.strip()}")
    numbers = {
        name: int(re.search(pattern, done.stderr).group(1))  # type: ignore[union-attr]
        for name, pattern in (
            ("registers", r"Used (\d+) registers"),
            ("stack", r"(\d+) bytes stack frame"),
            ("stores", r"(\d+) bytes spill stores"),
            ("loads", r"(\d+) bytes spill loads"),
        )
    }
    mnemonics = re.findall(r"^\s*(?:@%?\w+ )?\{? ?([a-z]\w*(?:\.\w+)?)", text, re.MULTILINE)
    return Assembled(
        target, numbers["registers"], numbers["stack"], numbers["stores"] + numbers["loads"],
        Counter(mnemonics), time.perf_counter() - start,
    )  # fmt: skip


def flash_mma(layout: Any, dtype: str, target: str) -> Assembled:
    """The tensor-core kernel of one shape."""
    from . import flash_mma as module

    return assemble(
        module.flash_mma(layout, dtype), module.signature(), target, threads=layout.threads,
        min_blocks=layout.min_blocks,
    )  # fmt: skip


def shapes(target: str, quick: bool = False) -> Iterator[tuple[Any, str]]:
    """(layout, dtype): all equal widths, and the corners of the table; quick: the corners only."""
    from .mma_layout import LAYOUTS, layout_for

    capability = TARGETS[target][:2]
    for dtype, itemsize in {"float16": 2, "bfloat16": 2, "float32": 4}.items():
        corners = [(d, e) for d, e, *_ in LAYOUTS[itemsize, capability >= (9, 0)]]
        widths = corners if quick else [*corners, *((w, w) for w in range(16, 257, 16))]
        if not (quick and dtype == "bfloat16"):
            for d, e in dict.fromkeys(widths):
                yield layout_for(d, e, itemsize=itemsize, capability=capability), dtype


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.ptxas", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    spilled = 0
    for target in TARGETS:
        for layout, dtype in shapes(target, options.quick):
            done = flash_mma(layout, dtype, target)
            spilled += not done.clean
            print(
                f"{target:<7}{dtype:<9} d {layout.d:>3} e {layout.e:>3} "
                f"tiles {layout.block_q:>3} x {layout.block_k}, {layout.warps} warps: "
                f"{done.registers} registers, stack {done.stack_bytes}, spilled "
                f"{done.spill_bytes}, {done.instructions['mma.sync']} mma, {done.seconds:.1f} s",
                flush=True,
            )
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
