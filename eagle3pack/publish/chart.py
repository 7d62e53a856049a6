"""The chart of a card: acceptance at each position, one line a data set, as SVG.

Drawn on an opaque light ground, so that it reads alike where a hub is shown in dark. The bytes depend
on the values and on matplotlib's version alone: no date, no random ids.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence

from eagle3pack.errors import UsageError
from eagle3pack.publish.ledger import Node

INK, GROUND, GRID = "#1f2430", "#fbfbf9", "#d9dbe0"
COLOURS = ("#0b62a4", "#b4501e", "#2f7d4f", "#7a3e9d", "#8a6d00", "#a3264a")  # told apart in grey, too
MARKERS = "osD^vP"


def can_draw() -> bool:
    """matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_chart(runs: Sequence[Node]) -> bytes:
    """Draw the rates by position of all runs that have them.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "the card's chart needs matplotlib",
            hint="pip install 'eagle3pack[chart]', or take chart: true out of publish.yaml.",
        ) from None
    with matplotlib.rc_context({"svg.hashsalt": "eagle3pack", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(6.4, 3.4), facecolor=GROUND, layout="constrained")
        axes = figure.add_subplot(facecolor=GROUND)
        shown = [run for run in runs if run.per_position_accept_rate]
        for i, run in enumerate(shown):
            rates = [float(rate.raw) for rate in run.per_position_accept_rate]
            positions = range(1, len(rates) + 1)
            label = str(run.dataset.name.raw).replace("$", "\\$")
            if run.origin.raw == "quoted":
                label += " (quoted)"
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            axes.plot(positions, rates, color=colour, marker=marker, label=label, linewidth=1.8)
            for position, rate in zip(positions, rates, strict=True):
                axes.annotate(
                    f"{rate:.3f}",
                    (position, rate),
                    textcoords="offset points",
                    xytext=(6, 6 if i % 2 == 0 else -13),
                    color=colour,
                    fontsize=8,
                )
        longest = max(len(run.per_position_accept_rate) for run in shown)
        axes.set(xlabel="position in the draft", ylabel="acceptance rate", ylim=(0, 1))
        axes.set_xlim(0.8, longest + 0.4)
        axes.set_xticks(range(1, longest + 1))
        axes.grid(axis="y", color=GRID)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_color(GRID)
        axes.tick_params(colors=INK)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.legend(frameon=False, labelcolor=INK, loc="upper right")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", facecolor=GROUND, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
