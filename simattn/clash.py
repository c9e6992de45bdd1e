"""Is the importable ``kernels`` ours? A PyPI project of that name has a package of that name too.

Whichever of the two is installed last overwrites the other's files, so one environment holds one of
them. Nothing is imported to find out.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import packages_distributions
from pathlib import Path

MARK = 'DISTRIBUTION = "simattn"'


def clash() -> str | None:
    """One line that says which ``kernels`` hides ours, or None."""
    spec = importlib.util.find_spec("kernels")
    if spec is None or spec.origin is None:
        places = list(spec.submodule_search_locations or []) if spec else []
        where = f"{places[0]} has no __init__.py" if places else "it is not installed"
        return f"the package kernels is not simattn's: {where}; install simattn again"
    if MARK in Path(spec.origin).read_text(encoding="utf-8"):
        return None
    owners = sorted(set(packages_distributions().get("kernels", ())) - {"simattn"})
    return (
        f"the package kernels at {spec.origin} is not simattn's but that of the distribution "
        f"{', '.join(owners) or 'kernels'}: keep the two in separate environments"
    )
