"""Speculative decoding written once more, the slow way: no cache, no batch, float64, one token at a time.

It shares no line with the engine, so that equal counters mean equal arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, positions: Tensor, frequencies: Tensor, magnitude: float) -> Tensor:
    """Rotate (tokens, head_dim) as complex numbers; pairs are (i, i + half)."""
    half = len(frequencies)
    spin = torch.polar(torch.full((len(x), half), magnitude).double(), torch.outer(positions, frequencies))
    pairs = torch.complex(x[:, :half], x[:, half : 2 * half]) * spin
    return torch.cat((pairs.real, pairs.imag, x[:, 2 * half :]), dim=1)


class OracleDraft:
    """The draft over a growing list of entries; every pass starts from nothing."""

    def __init__(self, raw: dict[str, Any], weights: Weights, frequencies: Tensor, magnitude: float = 1.0):
        self.raw, self.w = raw, {name: t.double() for name, t in weights.items() if name != "d2t"}
        self.d2t = weights.get("d2t")
        self.frequencies, self.magnitude = frequencies.double(), magnitude
        self.eps = raw["rms_norm_eps"]

    def fuse(self, states: list[Tensor]) -> Tensor:
        if not self.raw.get("eagle_config", {}).get("use_aux_hidden_state", True):
            return states[-1]
        x = torch.cat(states)
        if "input_norm.weight" in self.w:
            x = rms(x, self.w["input_norm.weight"], self.eps)
        if "fc_norm.0.weight" in self.w:
            parts = x.split(len(x) // len(states))
            x = torch.cat([rms(p, self.w[f"fc_norm.{i}.weight"], self.eps) for i, p in enumerate(parts)])
        return self.w["fc.weight"] @ x

    def _project(self, prefix: str, x: Tensor) -> Tensor:
        y = x @ self.w[f"{prefix}.weight"].T
        return y + self.w[f"{prefix}.bias"] if f"{prefix}.bias" in self.w else y

    def _head(self, prefix: str, kind: str, x: Tensor, number: int, positions: Tensor) -> Tensor:
        depth = self.raw["head_dim"]
        y = self._project(f"{prefix}{kind}_proj", x)[:, number * depth : (number + 1) * depth]
        if kind == "v":
            return y
        if f"{prefix}{kind}_norm.weight" in self.w:
            y = rms(y, self.w[f"{prefix}{kind}_norm.weight"], self.eps)
        return turned(y, positions, self.frequencies, self.magnitude)

    def _layer(self, index: int, positions: Tensor, embeds: Tensor, hidden: Tensor) -> Tensor:
        p = f"layers.{index}."
        residual = hidden
        if index == 0:
            normed = rms(hidden, self.w[p + "hidden_norm.weight"], self.eps)
            x = torch.cat((rms(embeds, self.w[p + "input_layernorm.weight"], self.eps), normed), dim=1)
            residual = normed if self.raw["norm_before_residual"] else hidden
        else:
            x = rms(hidden, self.w[p + "input_layernorm.weight"], self.eps)
        heads, groups = self.raw["num_attention_heads"], self.raw["num_key_value_heads"]
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = []
        for h in range(heads):
            g = h // (heads // groups)
            query = self._head(p + "self_attn.", "q", x, h, positions)
            key = self._head(p + "self_attn.", "k", x, g, positions)
            scores = (query @ key.T / self.raw["head_dim"] ** 0.5).masked_fill(later, -math.inf)
            mixed.append(torch.softmax(scores, 1) @ self._head(p + "self_attn.", "v", x, g, positions))
        hidden = residual + self._project(f"{p}self_attn.o_proj", torch.cat(mixed, dim=1))
        y = rms(hidden, self.w[p + "post_attention_layernorm.weight"], self.eps)
        gate, up = y @ self.w[p + "mlp.gate_proj.weight"].T, y @ self.w[p + "mlp.up_proj.weight"].T
        return hidden + (gate * torch.sigmoid(gate) * up) @ self.w[p + "mlp.down_proj.weight"].T

    def run(self, entries: list[tuple[int, int, Tensor]]) -> tuple[Tensor, Tensor]:
        """entries: (position, token, hidden). Returns the last entry's normed and fed-back state."""
        positions = torch.tensor([position for position, _, _ in entries]).double()
        embeds = torch.stack([self.w["embed_tokens.weight"][token] for _, token, _ in entries])
        hidden = torch.stack([h for _, _, h in entries])
        for index in range(self.raw["num_hidden_layers"]):
            hidden = self._layer(index, positions, embeds, hidden)
        normed = rms(hidden[-1], self.w["norm.weight"], self.eps)
        return normed, normed if self.raw.get("norm_output") else hidden[-1]

    def propose(self, tokens: list[int], states: list[list[Tensor]], k: int) -> list[int]:
        """k tokens after `tokens`; states of all of them but the last."""
        entries = [(p, tokens[p + 1], self.fuse(states[p])) for p in range(len(tokens) - 1)]
        proposed: list[int] = []
        feedback = torch.empty(0)
        for step in range(k):
            if step:
                entries.append((len(tokens) - 2 + step, proposed[-1], feedback))
            normed, feedback = self.run(entries)
            best = int((self.w["lm_head.weight"] @ normed).argmax())
            proposed.append(best if self.d2t is None else best + int(self.d2t[best]))
        return proposed


def target_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def target_states(model: Any, tokens: list[int], layer_ids: tuple[int, ...]) -> list[list[Tensor]]:
    """By token, the states after so many layers; the final normed state where no layer is asked for."""
    with torch.inference_mode():
        all_states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert all(k < len(all_states) - 1 for k in layer_ids), "the last one is normed by transformers"
    chosen = [all_states[k] for k in layer_ids] or [all_states[-1]]
    return [[state[0, t].double() for state in chosen] for t in range(len(tokens))]


def speculate(
    model: Any,
    draft: OracleDraft,
    prompt: list[int],
    k: int,
    max_tokens: int,
    layer_ids: tuple[int, ...],
    stop_ids: frozenset[int],
) -> tuple[list[int], list[int], int]:
    """Returns output, accepted per position and drafts."""
    output = [int(target_logits(model, prompt)[-1].argmax())]
    accepted_at, drafts = [0] * k, 0
    while len(output) < max_tokens and output[-1] not in stop_ids:
        tokens = prompt + output
        proposed = draft.propose(tokens, target_states(model, tokens[:-1], layer_ids), k)
        own = target_logits(model, tokens + proposed)[len(tokens) - 1 :].argmax(-1).tolist()
        accepted = next((i for i in range(k) if proposed[i] != own[i]), k)
        drafts += 1
        for i in range(accepted):
            accepted_at[i] += 1
        for token in own[: accepted + 1]:
            if len(output) < max_tokens and output[-1] not in stop_ids:
                output.append(token)
    return output, accepted_at, drafts
