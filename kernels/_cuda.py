"""The one import of ``numba.cuda``, and the few words in which a GPU and the simulator differ.

Every other module takes ``cuda`` from here. On a GPU the kernels are compiled; under Numba's CUDA
simulator (``NUMBA_ENABLE_CUDASIM=1``) the same functions run as Python, a thread per CUDA thread.
"""

from __future__ import annotations

import numpy as np

try:
    import numba_cuda
    from numba import config, cuda, types
except ImportError as error:
    raise ImportError(
        "kernels needs Numba's CUDA target: in a clone, pip install '.[cu13]' (or '.[cu12]'); "
        "'.[test]' is enough for the simulator"
    ) from error

SIMULATOR = bool(config.ENABLE_CUDASIM)
ELEMENT = types.float32  # of every array in shared memory and registers


def numpy_too_new(numpy_version: str, numba_cuda_version: str) -> bool:
    """True for the pairs that cannot compile: numba-cuda up to 0.30 calls ``np.row_stack``.

    >>> numpy_too_new("2.5.0", "0.30.4"), numpy_too_new("2.4.6", "0.30.4")
    (True, False)
    """
    release = [tuple(map(int, v.split(".")[:2])) for v in (numpy_version, numba_cuda_version)]
    return release[0] >= (2, 5) and release[1] <= (0, 30)


if not SIMULATOR and numpy_too_new(np.__version__, numba_cuda.__version__):
    raise ImportError(
        f"numba-cuda {numba_cuda.__version__} does not compile under NumPy {np.__version__}: "
        "pip install 'numpy<2.5'"
    )

if SIMULATOR:
    float32 = np.float32
    int32 = offset = int
    SHARED_ALIGN = None  # the simulator takes no alignment

    def device(function):
        """A function called from kernels: here, itself."""
        return function

    def float_bits(x):
        """The 32 bits of a float32."""
        return np.float32(x).view(np.uint32)

    def bits_float(u):
        """The float32 of these 32 bits."""
        return np.uint32(u).view(np.float32)

    uint16, uint32, float16 = np.uint16, np.uint32, np.float16

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    float32, float16 = types.float32, types.float16
    int32, uint16, uint32 = types.int32, types.uint16, types.uint32
    # Shared-memory indices are cast to unsigned: a signed one costs Numba's test for a negative
    # index at each access, and hides from the compiler that four neighbours are one 16-byte load.
    offset = types.uint64
    SHARED_ALIGN = 16

    # Inlined as Numba IR: local arrays passed to it stay in registers, and compiling needs no GPU.
    device = cuda.jit(device=True, inline="always")

    @intrinsic
    def float_bits(typingctx, x):
        """The 32 bits of a float32."""

        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], ir.IntType(32))

        return types.uint32(types.float32), codegen

    @intrinsic
    def bits_float(typingctx, u):
        """The float32 of these 32 bits."""

        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], ir.FloatType())

        return types.float32(types.uint32), codegen
