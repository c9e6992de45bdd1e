"""A call like an earlier one: what shapes, strides and options decide is not decided again.

Only for torch tensors, on torch's current stream. What can differ between two such calls is looked
at each time: addresses, and whether ``out`` lies over an input.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import driver, tensors
from .driver import Arguments, Loaded
from .plans import ALIGNMENT, Plan
from .problem import NO_WINDOW
from .tensors import Tensor

MOST = 4096  # calls remembered
MOST_READY = 64  # arguments that a call keeps, for addresses that it has met
NOT_REMEMBERED = None, ()
_known: dict[Hashable, Repeat] = {}


@dataclass(frozen=True, slots=True)
class Repeat:
    """What an earlier call found out."""

    plan: Plan
    loaded: Loaded
    spans: tuple[tuple[int, int], ...]  # of q, k, v, out: bytes from the first element to the ends
    ready: dict[tuple[int, ...], Arguments] = field(default_factory=dict)

    def launch(self, q: Any, out: Any, addresses: tuple[int, ...]) -> Any:
        """Launch, and return what `flash_attention` returns; None if that must look closer.

        ``addresses`` are the four that came with the key.
        """
        torch, plan = sys.modules["torch"], self.plan
        if out is None:
            out = torch.empty(plan.problem.out_shape, dtype=q.dtype, device=q.device)
            addresses = (*addresses[:3], out.data_ptr())
        lse = None
        if plan.statistics:
            lse = torch.empty(plan.problem.lse_shape, dtype=torch.float32, device=q.device)
            addresses = (*addresses, lse.data_ptr())
        arguments = self.ready.get(addresses) or self._arguments(addresses)
        if arguments is None:
            return None
        stream = tensors.torch_stream(plan.device)
        driver.launch(self.loaded, plan.device, plan.grid, stream, arguments)
        return out if lse is None else (out, lse)

    def _arguments(self, addresses: tuple[int, ...]) -> Arguments | None:
        """For these addresses; None if out lies over an input, or a tensor has no memory."""
        spans = [*zip(addresses, self.spans, strict=False)]  # L has none: its memory is new
        if any(not at and low < high for at, (low, high) in spans):
            return None
        *inputs, (first, end) = ((at + low, at + high) for at, (low, high) in spans)
        if any(low < end and first < high for low, high in inputs):
            return None
        if len(self.ready) >= MOST_READY:
            self.ready.clear()
        arguments = self.ready[addresses] = self.loaded.arguments(self.plan.pack(addresses))
        return arguments


def key(
    q: Any, k: Any, v: Any, out: Any, is_causal: Any, return_lse: Any, variant: Any, softcap: Any,
    scale: Any, window: Any,
) -> tuple[Hashable, tuple[int, ...]]:  # fmt: skip
    """What a call is remembered by, None for one that is not; and its four addresses.

    Each attribute is read once, and what all tensors share is in the key once: every call pays for
    this. Options count in their usual types alone, for 1 is equal to True and refused.
    """
    torch = sys.modules.get("torch")
    if (
        torch is None
        or not type(is_causal) is type(return_lse) is bool
        or not (variant is None or type(variant) is str)
        or not (type(softcap) is float or type(softcap) is int)
        or not (scale is None or type(scale) is float)
        or not (window is NO_WINDOW or _is_pair(window))
    ):
        return NOT_REMEMBERED
    plain = torch.Tensor
    if not type(q) is type(k) is type(v) is plain or not (out is None or type(out) is plain):
        return NOT_REMEMBERED
    dtype, device = q.dtype, q.device
    if (
        not dtype is k.dtype is v.dtype
        or not device == k.device == v.device
        or (q.requires_grad or k.requires_grad or v.requires_grad)
        or (q.is_neg() or k.is_neg() or v.is_neg())
    ):
        return NOT_REMEMBERED
    of_out, at_out = None, 0
    try:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if out is not None:
            if out.dtype is not dtype or out.device != device or out.requires_grad or out.is_neg():
                return NOT_REMEMBERED
            of_out, at_out = (out.shape, out.stride()), out.data_ptr()
        # A plan needs all tensors aligned, or none: which one is not does not matter.
        alignment = (at_q | at_k | at_v | at_out) % ALIGNMENT
        call = (
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), of_out, alignment,
            dtype, device, is_causal, return_lse, variant, softcap, scale, window,
        )  # fmt: skip
    except RuntimeError:  # raised by every layout but the strided: no address, or no strides
        return NOT_REMEMBERED
    return call, (at_q, at_k, at_v, at_out)


def _is_pair(window: Any) -> bool:
    return type(window) is tuple and [*map(type, window)] == [int, int]


def find(key: Hashable) -> Repeat | None:
    """The call remembered by this key, if there is one."""
    return _known.get(key)


def remember(key: Hashable, plan: Plan, loaded: Loaded, views: Sequence[Tensor]) -> None:
    """Keep a call that went well. ``views`` are q, k, v and out."""
    if plan.statistics not in ((), ("L",)) or not plan.grid:
        return
    if len(_known) >= MOST:
        _known.clear()
    spans = tuple((x.span[0] - x.pointer, x.span[1] - x.pointer) for x in views)
    _known[key] = Repeat(plan, loaded, spans)
