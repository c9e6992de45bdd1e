"""simattn: softmax and attention on a counted memory hierarchy.

``attention`` runs a variant on a simulated HBM and SRAM and reports what it moved; ``predict``
gives the same numbers from the closed form alone; ``row_softmax`` does the softmaxes. Read
``memory.py`` first, then ``softmax.py``, then ``variants.py``.
"""

from simattn.counts import Counts, Flops, SRAMTraffic, Traffic
from simattn.iomodel import predict, predict_softmax
from simattn.memory import SRAMCapacityError
from simattn.run import Run, attention, row_softmax

__version__ = "0.1.0"
__all__ = [
    "Counts",
    "Flops",
    "Run",
    "SRAMCapacityError",
    "SRAMTraffic",
    "Traffic",
    "attention",
    "predict",
    "predict_softmax",
    "row_softmax",
]
