"""Run a GPU kernel on a CPU, and see what a profiler and a sanitizer would. See EMULATOR.md."""

from .launch import emulate
from .memory import Placed, TensorMap
from .report import FAULTS, Fault, KernelFaultError, Report

__all__ = ["FAULTS", "Fault", "KernelFaultError", "Placed", "Report", "TensorMap", "emulate"]
