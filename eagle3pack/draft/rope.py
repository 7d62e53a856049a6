"""Rotary position embedding settings in both spellings that configs use.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`. Where both
stand, `rope_parameters` wins, as in vLLM 0.32 (measured).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3pack.draft.fields import Fields

KNOWN_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"})


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions enter the attention.

    Attributes:
        theta: the base of the frequencies; None where the config does not say (engines then take 10000).
        rope_type: "default", "linear", "dynamic", "yarn", "longrope", "llama3", or what the config says.
        scaling: the parameters of that type, without rope_type and rope_theta.
        partial_rotary_factor: share of head_dim that is rotated.
    """

    theta: float | None = None
    rope_type: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary_factor: float = 1.0

    def as_v4(self) -> dict[str, Any]:
        """The transformers 4 spelling: {"rope_theta": ..., "rope_scaling": {...} or None}."""
        scaling = (
            None
            if self.rope_type == "default" and not self.scaling
            else {"rope_type": self.rope_type, **self.scaling}
        )
        return {"rope_theta": self.theta, "rope_scaling": scaling}

    def as_v5(self) -> dict[str, Any]:
        """The transformers 5 spelling: the value of `rope_parameters`."""
        parameters = {"rope_theta": self.theta, "rope_type": self.rope_type, **self.scaling}
        if self.partial_rotary_factor != 1.0:
            parameters["partial_rotary_factor"] = self.partial_rotary_factor
        return parameters


def parse_rope(fields: Fields) -> RopeConfig:
    """Read the rotary settings out of the object that holds them.

    Raises:
        InputError: a wrong type, or a theta or factor that is not a positive number.
    """
    new = fields.object("rope_parameters")
    nested = new.values.get("full_attention")  # transformers 5 may key by layer type
    if isinstance(nested, dict):
        new = new.object("full_attention")
    old = fields.object("rope_scaling")
    source = new if new.values else old
    rope_type = source.string("rope_type", source.string("type", "default"))
    theta_field = new if new.has("rope_theta") else fields
    partial_field = new if new.has("partial_rotary_factor") else fields
    return RopeConfig(
        theta=theta_field.number("rope_theta") if theta_field.has("rope_theta") else None,
        rope_type=rope_type,
        scaling={
            key: value
            for key, value in source.values.items()
            if key not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")
        },
        partial_rotary_factor=partial_field.number("partial_rotary_factor", 1.0),
    )
