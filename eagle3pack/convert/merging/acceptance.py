"""What a conversion's stages had accepted of the same texts, as figures for people and for the record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle3pack.engine.counters import (
    Counters,
    mean_accepted_length,
    per_position_accept_rate,
    retention,
    total,
)
from eagle3pack.engine.statistics import retention_interval

# Of fewer, an interval says more of the bootstrap than of the drafts: two texts that agree give none at all.
FEWEST_TEXTS = 5
FEWEST_DRAFTS = 100  # of the source


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counters by text.

    Attributes:
        source: before the merge.
        mean: mean pooling of the same groups.
        merged: after the merge.
        healed: after healing too; None where there was none.
    """

    source: tuple[Counters, ...]
    mean: tuple[Counters, ...]
    merged: tuple[Counters, ...]
    healed: tuple[Counters, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON types only; definitions are vLLM's, and `verify`'s for retention and its 95 % interval.

        There is no interval where texts or drafts are too few to tell.
        """
        return {
            "num_texts": len(self.source),
            "source": self._figures(self.source),
            "mean": self._figures(self.mean),
            "merged": self._figures(self.merged),
            "healed": None if self.healed is None else self._figures(self.healed),
        }

    def quality(self) -> dict[str, float]:
        """The same by name, flat, without what is not known."""
        stages = {"_of_source": self.source, "_by_mean": self.mean, "": self.healed or self.merged}
        if self.healed is not None:
            stages["_before_healing"] = self.merged
        quality: dict[str, float] = {"accepted_texts": len(self.source)}
        for suffix, counters in stages.items():
            found = self._figures(counters)
            low, high = found["retention_interval"] or (None, None)
            named = {
                "accepted_drafts": found["drafts"],
                "accepted_length": found["mean_accepted_length"],
                "retention": found["retention"],
                "retention_low": low,
                "retention_high": high,
            } | {f"accepted_at_{i}": rate for i, rate in enumerate(found["per_position_accept_rate"], 1)}
            quality |= {f"{name}{suffix}": value for name, value in named.items() if value is not None}
        return quality

    def _figures(self, ours: tuple[Counters, ...]) -> dict[str, Any]:
        mine, other = total(ours), total(self.source)
        enough = len(self.source) >= FEWEST_TEXTS and other.drafts >= FEWEST_DRAFTS
        interval = retention_interval(ours, self.source) if enough else None
        return {
            "drafts": mine.drafts,
            "accepted_per_position": list(mine.accepted_per_position),
            "mean_accepted_length": mean_accepted_length(mine),
            "per_position_accept_rate": list(per_position_accept_rate(mine) or ()),
            "retention": retention(mine, other),
            "retention_interval": None if interval is None else [interval.low, interval.high],
        }
