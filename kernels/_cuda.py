"""The one import of ``numba.cuda``, what differs on a GPU and the simulator, and `word`.

Every other module takes ``cuda`` from here. On a GPU the kernels are compiled; under Numba's CUDA
simulator (``NUMBA_ENABLE_CUDASIM=1``) the same functions run as Python, a thread per CUDA thread.
"""

from __future__ import annotations

import inspect

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

    word = device

    def float_bits(x):
        """The 32 bits of a float32."""
        return np.float32(x).view(np.uint32)

    def bits_float(u):
        """The float32 of these 32 bits."""
        return np.uint32(u).view(np.float32)

    uint16, uint32, float16 = np.uint16, np.uint32, np.float16

else:
    from llvmlite import ir
    from numba.cuda.compiler import CUDACompiler, compile_extra
    from numba.cuda.core import typed_passes, untyped_passes
    from numba.cuda.core.callconv import CUDACallConv
    from numba.cuda.core.compiler_machinery import PassManager
    from numba.cuda.core.errors import TypingError
    from numba.cuda.cudaimpl import lower
    from numba.cuda.descriptor import cuda_target
    from numba.cuda.flags import CUDAFlags
    from numba.cuda.typing.templates import AbstractTemplate, infer_global
    from numba.cuda.utils import numba_target_override

    float32, float16 = types.float32, types.float16
    int32, uint16, uint32 = types.int32, types.uint16, types.uint32
    # Shared-memory indices are cast to unsigned: a signed one costs Numba's test for a negative
    # index at each access, and hides from the compiler that four neighbours are one 16-byte load.
    offset = types.uint64
    SHARED_ALIGN = 16

    # Inlined as Numba IR: local arrays passed to it stay in registers, and compiling needs no GPU.
    # `flash_simt` is written in these; `word` below is for kernels of many of them.
    device = cuda.jit(device=True, inline="always")

    # ---- instructions and words: a kernel has hundreds of calls of dozens of them, and compiling
    # is Numba's time, not LLVM's. So each is typed once for its types of arguments, in few passes.

    class Intrinsic:
        """A function that a kernel calls and Python cannot."""

        def __init__(self, function):
            self.__name__, self.__doc__ = function.__name__, function.__doc__

        def __repr__(self):
            return f"<intrinsic {self.__name__}>"

        def __call__(self, *args):
            raise NotImplementedError(f"{self.__name__}: runs in a kernel")

        def __deepcopy__(self, memo):
            return self

    def intrinsic(define):
        """``numba.cuda.extending.intrinsic``, which looks for new registrations at each call."""
        inlined = Intrinsic(define)
        count = len(inspect.signature(define).parameters) - 1
        signatures, lowered = {}, set()

        class Template(AbstractTemplate):
            key = inlined

            def generic(self, args, kws):
                if kws or len(args) != count:
                    raise TypingError(f"{inlined.__name__}: {count} arguments, by position")
                if args not in signatures:
                    signature, codegen = define(self.context, *args)
                    if signature.args not in lowered:
                        lower(inlined, *signature.args)(codegen)
                        lowered.add(signature.args)
                    signatures[args] = signature
                return signatures[args]

        infer_global(inlined, types.Function(Template))
        return inlined

    def word(function):
        """A device function compiled by itself, which LLVM inlines where it is called.

        ``device`` leaves that to Numba, which copies a function's IR to each call and analyses all
        of it again: a kernel takes two or three times as long, and is the same in the end. Loops of
        constant length, if the function has any, need an ``unroll_loops`` of their own at its end.
        """

        def define(typingctx, *args):
            compiled = _compile(function, args)

            def codegen(context, builder, signature, values):
                context.add_linking_libs([compiled.library])
                _, result = compiled.fndesc.call_conv.call_internal_no_propagate(
                    builder, compiled.fndesc, signature, values
                )
                return result

            return compiled.signature, codegen

        names = ("typingctx", *inspect.signature(function).parameters)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        define.__name__, define.__doc__ = function.__name__, function.__doc__
        define.__signature__ = inspect.Signature([inspect.Parameter(x, kind) for x in names])
        inlined = intrinsic(define)
        inlined.py_func = function  # as a dispatcher has it
        return inlined

    def _compile(function, args):
        """``numba.cuda.compiler.compile_cuda`` with ``forceinline``, and the two classes below."""
        flags = _Flags()
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        flags.forceinline, flags.error_model = True, "numpy"
        flags.nvvm_options, flags.compute_capability = {"opt": 3}, (9, 0)  # the kernel's count
        target = cuda_target.target_context
        with numba_target_override():
            compiled = compile_extra(
                cuda_target.typing_context, target, function, args, None, flags, {},
                pipeline_class=_Compiler, call_conv=CUDACallConv(target), abi_info={},
            )  # fmt: skip
        compiled.library.finalize()
        return compiled

    class _Flags(CUDAFlags):
        """Numba's, compared by what was set: each operator's typing looks them up many times."""

        __slots__ = ()

        def __eq__(self, other):
            return type(other) is _Flags and self._values == other._values

        def __hash__(self):
            return hash(tuple(sorted(self._values)))

    class _Compiler(CUDACompiler):
        """Numba's passes, less those for what words lack: closures, array expressions and such."""

        NEEDLESS = (
            untyped_passes.WithLifting, untyped_passes.InlineClosureLikes,
            untyped_passes.RewriteDynamicRaises, untyped_passes.MakeFunctionToJitFunction,
            untyped_passes.InlineInlinables, untyped_passes.FindLiterallyCalls,
            untyped_passes.LiteralUnroll, untyped_passes.LiteralPropagationSubPipelinePass,
            typed_passes.InlineOverloads, typed_passes.NopythonRewrites,
        )  # fmt: skip

        def define_pipelines(self):
            (usual,) = super().define_pipelines()
            lean = PassManager("word")
            for implementation, description in usual.passes:
                if implementation not in self.NEEDLESS:
                    lean.add_pass(implementation, description)
            lean.finalize()
            return [lean]

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
