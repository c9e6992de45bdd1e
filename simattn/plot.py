"""Pictures of the counts. matplotlib is imported when one is drawn, and not before.

Each picture is a function of numbers that a closed form or a recorded run gives; the numbers come
from functions of their own. Lines differ in colour, dash and marker, and are named where they end,
so that a picture survives grey print and colour-blind eyes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from simattn import tiling
from simattn.counts import Counts
from simattn.device import Device, Placed, least_floor
from simattn.dtypes import DTYPES
from simattn.figures import SAHA_D, SAHA_N, geometric, rows_traffic, slope, square_traffic
from simattn.iomodel import predict
from simattn.trace import Trace, duration_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORDERS = ("q_outer", "kv_outer")
# Okabe and Ito's colours, which the colour-blind can tell apart
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#a5266b", "#555555"
STYLES: dict[str, dict[str, Any]] = {
    "q_outer": {"color": BLUE, "linestyle": "-", "marker": "o"},
    "kv_outer": {"color": ORANGE, "linestyle": "--", "marker": "s"},
    "standard_online": {"color": GREY, "linestyle": ":", "marker": "^"},
    "two_pass": {"color": GREEN, "linestyle": "-.", "marker": "D"},
    "split_kv": {"color": PURPLE, "linestyle": (0, (4, 1, 1, 1)), "marker": "v"},
}


class PlotError(ValueError):
    """A picture that can't be drawn or written; the message says what to do."""


def figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any
) -> tuple[Figure, Any]:
    """An empty figure and its axes, in inches."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError(
            "plot: needs matplotlib, which the extra 'plot' brings: pip install 'simattn[plot]'"
        ) from None
    with matplotlib.rc_context(
        {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
         "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
         "hatch.linewidth": 0.6}
    ):  # fmt: skip
        fig = Figure(figsize=(width, height), layout="constrained")
        return fig, fig.subplots(rows, columns, **shared)


def save(fig: Figure, path: str) -> None:
    """Write the picture; its format is the suffix's."""
    try:
        fig.savefig(path, dpi=130)
    except OSError as error:
        raise PlotError(f"--out {path}: must be writable ({error.strerror})") from None
    except ValueError as error:
        known = "png, svg or pdf"
        raise PlotError(f"--out {path}: must end in {known} ({error})") from None


def best_bytes(variant: str, sram_bytes: int, **shape: Any) -> int | None:
    """HBM bytes with the best tiles, None where none fit."""
    tiles = tiling.best(variant, sram_bytes, **shape)
    return tiles.counts.traffic.total_bytes if tiles else None


def line(
    axes: Axes, xs: Sequence[float], ys: Sequence[float | None], name: str, *, up: int = 0,
    **more: Any,
) -> None:  # fmt: skip
    """A line, named at its right end, ``up`` points above it."""
    kept = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    if not kept:
        return
    style = {**STYLES.get(name, {"color": GREY}), "markersize": 4, "linewidth": 1.8, **more}
    axes.plot([x for x, _ in kept], [y for _, y in kept], **style)
    x, y = kept[-1]
    axes.annotate(name, (x, y), xytext=(6, up), textcoords="offset points", va="center",
                  color=style["color"], fontweight="bold", annotation_clip=False)  # fmt: skip


def thousands(x: float) -> str:
    """A size for an axis.

    >>> [thousands(x) for x in (512, 4096, 1 << 20, 1536)]
    ['512', '4K', '1M', '1.5K']
    """
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if x >= unit:
            return f"{x / unit:g}{name}"
    return f"{x:g}"


def ticks(axis: Any, values: Sequence[float], shown: Callable[[float], str] = thousands) -> None:
    axis.set_ticks(list(values), labels=[shown(x) for x in values], minor=False)
    axis.set_ticks([], minor=True)


# Traffic against N


def traffic_by_rows(
    sizes: Sequence[int], variants: Sequence[str], sram_bytes: int, **shape: Any
) -> dict[str, list[int | None]]:
    """HBM bytes of each variant's best tiles at each N."""
    return {v: [best_bytes(v, sram_bytes, n=n, **shape) for n in sizes] for v in variants}


def traffic_n(sram_bytes: int, *, d: int = 64, dtype: str = "float16", **shape: Any) -> Figure:
    """Traffic against N: three ways to go through the same products."""
    sizes = [256 << i for i in range(9)]
    names = ("standard_online", "kv_outer", "q_outer")
    found = traffic_by_rows(sizes, names, sram_bytes, d=d, dtype=dtype, **shape)
    if not any(value for values in found.values() for value in values):
        raise ValueError(f"sram {sram_bytes}: no variant has tiles that fit")
    width = DTYPES[dtype].width_bytes
    fig, axes = figure(6.6, 4.2)
    for name in names:
        line(axes, sizes, found[name], name, up={"kv_outer": 6, "q_outer": -6}.get(name, 0))
    line(axes, sizes, [4 * n * d * width for n in sizes], "each tensor once", color="black",
         linestyle="-", linewidth=1, marker="")  # fmt: skip
    title = f"HBM traffic of one head: d {d}, {dtype}, {sram_bytes / 1024:g} KiB of SRAM"
    axes.set(xscale="log", yscale="log", xlabel="N, rows of Q, K and V", title=title,
             ylabel="HBM traffic, bytes")  # fmt: skip
    ticks(axes.xaxis, sizes)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    return fig


# Traffic against SRAM


@dataclass(frozen=True, slots=True)
class Crossing:
    """The loop order that moves less changes between two budgets, in bytes."""

    before: int
    after: int
    winner: str


def rule_bytes(rule: str, variant: str, sram_bytes: int, **shape: Any) -> int | None:
    """HBM bytes under a tile rule, whether its tiles fit or not."""
    if rule == "best":
        return best_bytes(variant, sram_bytes, **shape)
    found = tiling.rule_tiles(rule, variant, sram_bytes, **shape)
    return found.counts.traffic.total_bytes


def by_sram(
    budgets: Sequence[int], rule: str, **shape: Any
) -> tuple[dict[str, list[int | None]], list[Crossing]]:
    """HBM bytes of both loop orders at each budget, and where the order that wins changes."""
    moved = {v: [rule_bytes(rule, v, M, **shape) for M in budgets] for v in ORDERS}
    return moved, crossings(budgets, moved)


def crossings(budgets: Sequence[int], moved: Mapping[str, Sequence[int | None]]) -> list[Crossing]:
    """Where the loop order that moves less changes. Ties change nothing.

    >>> crossings([1, 2, 3], {"q_outer": [5, 4, 4], "kv_outer": [6, 4, 3]})
    [Crossing(before=1, after=3, winner='kv_outer')]
    """
    found = []
    last: tuple[int, str] | None = None
    for M, q, kv in zip(budgets, moved["q_outer"], moved["kv_outer"], strict=True):
        if q is None or kv is None or q == kv:
            continue
        winner = "q_outer" if q < kv else "kv_outer"
        if last and last[1] != winner:
            found.append(Crossing(last[0], M, winner))
        last = M, winner
    return found


def traffic_sram(
    *, n: int = 4096, d: int = 64, dtype: str = "float16",
    moved: Mapping[str, Mapping[str, Sequence[int | None]]] | None = None,
    budgets: Sequence[int] | None = None, **shape: Any,
) -> Figure:  # fmt: skip
    """Traffic against SRAM under each tile rule, with the crossings of the loop orders."""
    width = DTYPES[dtype].width_bytes
    budgets = budgets or sram_budgets(d, width)
    rules = {"seed": "seed's rule", "paper": "paper's rule", "best": "best tiles that fit"}
    fig, panels = figure(9.6, 4.0, 1, 3, sharey=True, sharex=True)
    xs = [M / width / d**2 for M in budgets]
    for axes, (rule, title) in zip(panels, rules.items(), strict=True):
        data = moved[rule] if moved else by_sram(budgets, rule, n=n, d=d, dtype=dtype, **shape)[0]
        for name in ORDERS:
            axes.plot(xs, [math.nan if y is None else y / 1e6 for y in data[name]],
                      **{**STYLES[name], "marker": ""}, linewidth=1.8, label=name)  # fmt: skip
        wins = crossings(budgets, data)
        for c in wins:
            axes.axvline(c.after / width / d**2, color="black", linewidth=0.8, linestyle=":")
        if wins:
            text = "\n".join(f"from {c.after / width / d**2:.2g} d²: {c.winner}" for c in wins[:4])
        else:
            q = [y for y in data["q_outer"] if y is not None]
            text = "no crossing" if q else ""
        axes.text(0.97, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=9)
        axes.set_title(title)
        axes.set(xscale="log", yscale="log", xlabel=f"SRAM, in d² = {d * d * width / 1024:g} KiB")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        ticks(axes.xaxis, [1, 2, 4, 8, 16, 32, 64], lambda x: f"{x:g}")
    low, high = panels[0].get_ylim()
    decades = [f * 10**k for k in range(-6, 13) for f in (1, 2, 5)]
    ticks(panels[0].yaxis, [y for y in decades if low <= y <= high], lambda x: f"{x:g}")
    panels[0].set_ylabel("HBM traffic, MB (1e6 bytes)")
    panels[0].legend(loc="lower left", frameon=False)
    fig.suptitle(f"Loop orders against SRAM: N {n}, d {d}, {dtype}, one head", fontsize=11)
    return fig


def sram_budgets(d: int, width: int) -> list[int]:
    """From d^2 to 64 d^2 elements, in bytes."""
    return [width * M for M in geometric(d * d, 64 * d * d, 73)]


# Traffic against tile size: the paper's Figure 2, middle


def by_block_k(sizes: Sequence[int], **shape: Any) -> list[float]:
    """Forward GB of ``kv_outer``, with every element taking 2 bytes, m and l too."""
    return [
        2 * predict("kv_outer", block_q=64, block_k=Bc, **shape).traffic.total_elems / 1e9
        for Bc in sizes
    ]


def tile_size() -> Figure:
    """Forward HBM traffic falls as key tiles grow."""
    sizes = [32, 64, 128, 256, 512, 1024]
    moved = by_block_k(sizes, n=1024, d=64, heads=16, batch=64, dtype="float16")
    fig, axes = figure(5.6, 3.8)
    axes.plot(sizes, moved, **STYLES["kv_outer"], linewidth=1.8)
    for Bc, gb in zip(sizes, moved, strict=True):
        axes.annotate(f"{gb:.2f}", (Bc, gb), xytext=(4, 6), textcoords="offset points")
    axes.set(xscale="log", xlim=(28, 1400), ylim=(0, 15), xlabel="Bc, key rows of a tile",
             ylabel="forward HBM traffic, GB (1e9 bytes)",
             title="kv_outer, N 1024, d 64, 16 heads, batch 64, fp16")  # fmt: skip
    ticks(axes.xaxis, sizes)
    return fig


# Heat map


def traffic_grid(
    variant: str, row_sizes: Sequence[int], key_sizes: Sequence[int], **shape: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """HBM bytes and SRAM bytes of every pair of tile sizes, [block_q, block_k]."""
    counts: list[list[Counts]] = [
        [predict(variant, block_q=Br, block_k=Bc, **shape) for Bc in key_sizes] for Br in row_sizes
    ]
    moved = np.array([[c.traffic.total_bytes for c in line] for line in counts], dtype=np.float64)
    needed = np.array([[c.peak_sram_bytes for c in line] for line in counts])
    return moved, needed


def heatmap(
    sram_bytes: int, *, n: int = 4096, d: int = 64, dtype: str = "float16", granule: int = 16,
    **shape: Any,
) -> Figure:  # fmt: skip
    """Traffic over Br and Bc for both loop orders, the edge of the capacity, and the optimum."""
    fig, panels = figure(9.6, 4.6, 1, 2, sharey=True)
    from matplotlib.colors import LogNorm

    shape = {"n": n, "d": d, "dtype": dtype, **shape}
    sizes = sizes_that_fit(sram_bytes, granule, **shape)
    grids = {v: traffic_grid(v, sizes, sizes, **shape) for v in ORDERS}
    shown = np.concatenate([moved[needed <= sram_bytes] for moved, needed in grids.values()]) / 1e6
    norm = LogNorm(shown.min(), shown.max())
    image: Any = None
    step = sizes[0]
    for axes, (variant, (moved, needed)) in zip(panels, grids.items(), strict=True):
        fits = needed <= sram_bytes
        image = axes.pcolormesh(
            sizes, sizes, np.where(fits, moved / 1e6, np.nan), norm=norm, cmap="cividis_r",
            shading="nearest", rasterized=True,
        )  # fmt: skip
        hatched = axes.contourf(sizes, sizes, np.where(fits, 1.0, 0.0), levels=[-0.5, 0.5],
                                colors="none", hatches=["///"])  # fmt: skip
        hatched.set(edgecolor="#b5b5b5", linewidth=0, zorder=0)
        reach = [int(line.sum()) for line in fits] + [0]
        for Br, last, above in zip(sizes, reach, reach[1:], strict=False):  # the edge, in steps
            if last:
                right, over, top = step * (last + 0.5), step * (above + 0.5), Br + step / 2
                axes.plot([right, right, over], [Br - step / 2, top, top], color="black",
                          linewidth=1.6)  # fmt: skip
        axes.set(xlim=(step / 2, sizes[-1]), ylim=(step / 2, sizes[-1]))
        tiles = tiling.best(variant, sram_bytes, granule=granule, **shape)
        if tiles:
            axes.plot(tiles.block_k, tiles.block_q, marker="*", markersize=17, color="#d55e00",
                      markeredgecolor="white", markeredgewidth=1.2, clip_on=False)  # fmt: skip
            right = tiles.block_k < sizes[-1] / 2
            axes.annotate(
                f"best {tiles.block_q} x {tiles.block_k}\n"
                f"{tiles.counts.traffic.total_bytes / 1e6:.3g} MB",
                (tiles.block_k, tiles.block_q), xytext=(14 if right else 0, 12 if right else 26),
                textcoords="offset points", ha="left" if right else "right", fontweight="bold",
                bbox=LABEL,
            )  # fmt: skip
        axes.set_title(variant)
        axes.set_xlabel("Bc, key rows of a tile")
        axes.text(0.95, 0.93, "does not fit", transform=axes.transAxes, ha="right", va="top",
                  bbox=LABEL)  # fmt: skip
    panels[0].set_ylabel("Br, query rows of a tile")
    bar = fig.colorbar(image, ax=panels, label="HBM traffic, MB (1e6 bytes)")
    bar.minorticks_off()
    levels = [shown.min() * (shown.max() / shown.min()) ** (i / 5) for i in range(6)]
    bar.set_ticks(levels, labels=[f"{x:.3g}" for x in levels])
    fig.suptitle(
        f"Tiles for {sram_bytes / 1024:g} KiB of SRAM: N {n}, d {d}, {dtype}, one head", fontsize=11
    )
    return fig


LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 2}


def sizes_that_fit(sram_bytes: int, granule: int, *, n: int, **shape: Any) -> list[int]:
    """Tile rows to draw: a little past the largest that fit, 64 sizes at the most."""
    smallest = [tiling.smallest_budget(v, granule=granule, n=n, **shape) for v in ORDERS]
    if min(smallest) > sram_bytes:
        raise PlotError(
            f"--sram {sram_bytes}: fits no tiles, must be at least {min(smallest)} bytes"
        )
    most = granule
    for variant in ORDERS:
        for axis in ("block_q", "block_k"):
            other = {"block_k": granule} if axis == "block_q" else {"block_q": granule}
            found = tiling.best(variant, sram_bytes, granule=granule, n=n, **shape, **other)
            most = max(most, getattr(found, axis) if found else 0)
    step = granule * -(-most // (60 * granule))
    return list(range(step, min(most + 2 * step, max(n, step)) + 1, step))


# Roofline


def placed(
    machine: Device, variants: Sequence[str], *, dtype: str, **shape: Any
) -> dict[str, Placed]:
    """Each variant at the tiles of its least floor; without those that don't fit the SRAM."""
    found = {v: least_floor(machine, v, dtype=dtype, **shape) for v in variants}
    if not any(found.values()):
        raise ValueError(f"device {machine.name}: no variant has tiles that fit its SRAM")
    return {variant: p for variant, p in found.items() if p}


def roofline(machine: Device, *, dtype: str = "float16", **shape: Any) -> Figure:
    """FLOP/s that the floors allow against intensity, over DRAM bytes and over L2-to-SM bytes."""
    names = ("standard_online", "two_pass", "q_outer", "kv_outer", "split_kv")
    points = placed(machine, names, dtype=dtype, **shape)
    fig, panels = figure(9.6, 4.3, 1, 2, sharey=True)
    peak = machine.matmul_flops_per_s[dtype] / 1e12
    for axes, title, rate, intensity in (
        (panels[0], "over DRAM bytes, each tensor once", machine.dram_bytes_per_s,
         attrgetter("flops_per_dram_byte")),
        (panels[1], "over L2-to-SM bytes, as counted", machine.l2_bytes_per_s,
         attrgetter("flops_per_l2_byte")),
    ):  # fmt: skip
        xs = [intensity(p.floor) for p in points.values()]
        ridge = peak * 1e12 / rate
        left, right = min([*xs, ridge]) / 3, max([*xs, ridge]) * 3
        axes.plot([left, ridge, right], [left * rate / 1e12, peak, peak], color="black",
                  linewidth=1.6)  # fmt: skip
        axes.annotate(f"{rate / 1e12:.3g} TB/s", (math.sqrt(left * ridge),
                      math.sqrt(left * ridge) * rate / 1e12), xytext=(-8, 6),
                      textcoords="offset points", ha="right")  # fmt: skip
        axes.annotate(f"matmul peak {peak:.4g} TFLOP/s", (right, peak), xytext=(0, 5),
                      textcoords="offset points", ha="right")  # fmt: skip
        sizes = iter(range(12, 0, -1))  # equal points show around each other
        for (variant, p), x in zip(points.items(), xs, strict=True):
            y = p.floor.matmul_flops / p.floor.seconds / 1e12
            style = {key: STYLES[variant][key] for key in ("color", "marker")}
            axes.plot(x, y, linestyle="", markersize=next(sizes), **style,
                      label=f"{variant}, {p.block_q} x {p.block_k}: {p.floor.binds}")  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="matmul FLOPs a byte", xlim=(left, right),
                 ylim=(None, 1.8 * peak))  # fmt: skip
        axes.set_title(title)
        axes.grid(color="#e3e3e3", linewidth=0.6)
    panels[0].set_ylabel("TFLOP/s, at most")
    panels[1].legend(loc="lower right", frameon=True, fontsize=9, title="and what binds")
    shown = ", ".join(f"{key} {value}" for key, value in shape.items())
    fig.suptitle(f"Roofline of {machine.name}: {dtype}, {shown}", fontsize=11)
    return fig


# SRAM over time

LAYERS: dict[str, tuple[str, str]] = {  # tile names, colour and hatch
    "Q": ("#56b4e9", ""), "K": ("#009e73", "..."), "V": ("#f0e442", "\\\\"),
    "O": ("#cc79a7", "//"), "S, P": ("#e69f00", "xx"), "m, l, factors": ("#777777", ""),
}  # fmt: skip


def occupancy_of(trace: Trace, machine: Device) -> tuple[list[float], dict[str, list[int]]]:
    """Times in seconds, each event's start and end, and the live bytes of each kind of tile."""
    times, now = [0.0], 0.0
    series: dict[str, list[int]] = {name: [0] for name in LAYERS}
    live: dict[int, tuple[str, int]] = {}
    for event in trace.events:
        live |= {number: (name, size) for number, name, size in event.added}
        if event.named and event.named[0] in live:
            live[event.named[0]] = event.named[1], live[event.named[0]][1]
        during = dict(live)
        for number in event.removed:
            del live[number]
        took = duration_s(event, machine, trace.dtype)
        for at, tiles in ((now, during), (now + took, during if took else live)):
            times.append(at)
            for name in LAYERS:
                series[name].append(sum(size for t, size in tiles.values() if layer(t) == name))
        now += took
    return times, series


def layer(name: str) -> str:
    """The kind of a tile."""
    if name in ("Q", "K", "V", "O"):
        return name
    return "S, P" if name in ("S", "P", "QK") else "m, l, factors"


def occupancy(traces: Sequence[Trace], machine: Device) -> Figure:
    """What lies in SRAM over time, by kind of tile."""
    fig, panels = figure(9.6, 2.5 * len(traces) + 0.8, len(traces), 1, sharex=True, squeeze=False)
    ends = []
    for axes, trace in zip(panels[:, 0], traces, strict=True):
        times, series = occupancy_of(trace, machine)
        ends.append(times[-1] * 1e6)
        base = np.zeros(len(times))
        for name, (colour, hatch) in LAYERS.items():
            top = base + np.array(series[name])
            axes.fill_between([t * 1e6 for t in times], base, top, facecolor=colour, hatch=hatch,
                              edgecolor="#333333", linewidth=0.3, label=name)  # fmt: skip
            base = top
        if trace.sram_bytes:
            axes.axhline(trace.sram_bytes, color="black", linewidth=1.4)
            axes.annotate("capacity", (0, trace.sram_bytes), xytext=(2, 3),
                          textcoords="offset points")  # fmt: skip
        peak = trace.counts.peak_sram_bytes
        axes.set_ylim(0, 1.25 * (trace.sram_bytes or peak))
        axes.set_ylabel("SRAM live, bytes")
        axes.set_title(f"{trace.variant}, {trace.block_q} x {trace.block_k}: peak {peak:,} bytes")
    panels[-1, 0].set_xlabel(f"time on {machine.name}, µs, one event after another")
    panels[-1, 0].set_xlim(0, max(ends))
    handles, labels = panels[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False)
    return fig


# Saha & Ye's two regimes


def slopes(n: int = SAHA_N, d: int = SAHA_D) -> Figure:
    """Least traffic against SRAM, below and above d^2 elements, with the fitted exponents."""
    square = d * d
    sizes = geometric(square // 256, 16 * square, 61)
    rows = [rows_traffic(M, n, d) for M in sizes]
    tiled = [square_traffic(M, n, d) for M in sizes]
    above = slope([M for M in sizes if square <= M], partial(rows_traffic, n=n, d=d))
    below = slope([M for M in sizes if square >= M], partial(square_traffic, n=n, d=d))
    fig, axes = figure(6.6, 4.4)
    xs = [M / square for M in sizes]
    axes.plot(xs, [math.nan if y is None else y / n**2 for y in rows], color=BLUE, linewidth=2)
    axes.plot(xs, [y / n**2 for y in tiled], color=ORANGE, linewidth=2, linestyle="--")
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.text(1.07, 0.95, "M = d²", transform=axes.get_xaxis_transform())
    axes.text(0.62, 0.1, f"whole rows (q_outer)\nslope {above:.2f} for M ≥ d²", color=BLUE,
              transform=axes.transAxes, ha="right")  # fmt: skip
    axes.text(0.06, 0.42, f"square tiles, the width tiled too\nslope {below:.2f} for M ≤ d²",
              color=ORANGE, transform=axes.transAxes)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="SRAM, M / d² (M in elements)",
             ylabel="HBM traffic, elements / N²",
             title=f"Two regimes: N {n}, d {d}")  # fmt: skip
    ticks(axes.xaxis, [1 / 256, 1 / 64, 1 / 16, 1 / 4, 1, 4, 16],
          lambda x: f"1/{round(1 / x)}" if x < 1 else f"{x:g}")  # fmt: skip
    axes.grid(color="#e3e3e3", linewidth=0.6)
    return fig
