"""A call like an earlier one: what shapes, strides and options decide is not decided again.

Only for torch tensors, on torch's current stream. What can differ between two such calls is looked
at each time: addresses, and whether ``out`` lies over an input.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from . import driver, tensors
from .driver import Arguments, Loaded
from .plans import ALIGNMENT, Plan
from .problem import NO_WINDOW
from .tensors import Tensor

MOST = 4096  # calls remembered
MOST_READY = 64  # arguments that a call keeps, for addresses that it has met
_known: dict[Hashable, Repeat] = {}


@dataclass(frozen=True, slots=True)
class Repeat:
    """What an earlier call found out."""

    plan: Plan
    loaded: Loaded
    spans: tuple[tuple[int, int], ...]  # of q, k, v, out: bytes from the first element to the ends
    ready: dict[tuple[int, ...], Arguments] = field(default_factory=dict)

    def __call__(self, q: Any, k: Any, v: Any, out: Any) -> Any:
        """Launch, and return what `flash_attention` returns; None if that must look closer."""
        torch, plan = sys.modules["torch"], self.plan
        if out is None:
            out = torch.empty(plan.problem.out_shape, dtype=q.dtype, device=q.device)
        lse = None
        if plan.statistics:
            lse = torch.empty(plan.problem.lse_shape, dtype=torch.float32, device=q.device)
            addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()
        else:
            addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        arguments = self.ready.get(addresses) or self._arguments(addresses)
        if arguments is None:
            return None
        stream = tensors.torch_stream(plan.device)
        with driver.on_device(plan.device):
            self.loaded.launch(plan.grid, stream, arguments)
        return out if lse is None else (out, lse)

    def _arguments(self, addresses: tuple[int, ...]) -> Arguments | None:
        """For these addresses; None if out lies over an input."""
        *inputs, (first, end) = (
            (at + low, at + high) for at, (low, high) in zip(addresses, self.spans, strict=False)
        )
        if any(low < end and first < high for low, high in inputs):
            return None
        if len(self.ready) >= MOST_READY:
            self.ready.clear()
        arguments = self.ready[addresses] = self.loaded.arguments(self.plan.pack(addresses))
        return arguments


def key(arrays: Sequence[Any], options: tuple[Any, ...], scale: Any, window: Any) -> Any:
    """What a call is remembered by; None for one that is not.

    ``options`` are True, False or None, or what is equal to them and not as good: their types are
    part of the key.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(scale) not in (float, NoneType):
        return None
    if window is not NO_WINDOW and (type(window) is not tuple or {*map(type, window)} != {int}):
        return None
    plain, strided = torch.Tensor, torch.strided
    parts = [options, *map(type, options), scale, window]
    for x in arrays:
        if x is None:
            parts.append(None)
        elif type(x) is not plain or x.layout is not strided or x.requires_grad or x.is_neg():
            return None
        else:
            parts += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT)
    return tuple(parts)


def find(key: Hashable) -> Repeat | None:
    """The call remembered by this key, if there is one."""
    try:
        return _known.get(key)
    except TypeError:  # an option that cannot be hashed, and is not one
        return None


def remember(key: Hashable, plan: Plan, loaded: Loaded, views: Sequence[Tensor]) -> None:
    """Keep a call that went well. ``views`` are q, k, v and out."""
    if plan.statistics not in ((), ("L",)) or not plan.grid:
        return
    if len(_known) >= MOST:
        _known.clear()
    spans = tuple((x.span[0] - x.pointer, x.span[1] - x.pointer) for x in views)
    _known[key] = Repeat(plan, loaded, spans)
