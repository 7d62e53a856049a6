"""Record what a draft's attention reads while it speculates on the target's own text.

Every pass counts: attention drifts from the true states of step 0 to the fed-back ones of the steps
after it (arXiv:2605.09992), and a refit that saw step 0 alone would serve the first token of a draft only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights, attention_logits
from eagle3pack.convert.merging.calibration import Stretch
from eagle3pack.convert.merging.moments import Sample
from eagle3pack.convert.merging.rotary import RopeSpec
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.generation import DraftPass

HELD_OUT_EVERY = 10  # of the prompts, one in ten is kept from averages and refits
LONGEST_STRETCH = 2048  # activations of one text: the attention over them is computed in one piece
MOST_ACTIVATIONS = 65536  # 1.6 GB at hidden size 6144
ENOUGH_PER_DIMENSION = 20  # activations a dimension of o_proj's input, after which the refit gains no more
DISTANCE_QUERIES = 8192  # queries that attention is measured on by distance
_BLOCK = 1024  # inputs a product of the second moment


@dataclass(slots=True)
class _Text:
    """What was kept of one request."""

    embeds: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    token_ids: list[Tensor] = field(default_factory=list)
    answer: list[Tensor] = field(default_factory=list)
    count: int = 0


class Recorder:
    """Takes the passes of a draft (`generate(..., on_draft_pass=recorder)`).

    Texts are told apart by conversation and turn. As passes come in the order of the text, no entry sees
    one that comes after it, so that a text may be cut anywhere.

    Args:
        draft: with embeddings.
        num_conversations: that will be answered.
        most: activations to keep: nine tenths of it for fits, and up to a quarter of it held out. Beyond
            that, evenly spaced tens of conversations are dropped.
    """

    def __init__(self, draft: DraftModel, num_conversations: int, most: int) -> None:
        self.num_moments = 0
        self.by_step: list[int] = []
        self._draft = draft
        self._holds_out = num_conversations > 1
        self._room = {False: most - most // 10, True: most // 4}  # by whether it is held out
        self._stride = {False: 1, True: 1}
        self._kept = {False: 0, True: 0}
        self._turn = 0
        self._conversations: Sequence[int] = range(num_conversations)
        self._answers: Sequence[Sequence[range]] = ()
        self._texts: dict[tuple[int, int], _Text] = {}
        width = 2 * draft.config.hidden_size
        self._moment = torch.zeros(width, width, dtype=torch.float64)
        self._sum = torch.zeros(width, dtype=torch.float64)
        self._pending: list[Tensor] = []
        self._num_pending = 0

    def start(self, turn: int, conversations: Sequence[int], answers: Sequence[Sequence[range]] = ()) -> None:
        """Announce a run of `generate`.

        Args:
            turn: of the conversations.
            conversations: of each prompt.
            answers: for each prompt, the positions that the target's own tokens follow: from the prompt's
                last token on, in a run of `generate`. Without them nobody can replay these texts.
        """
        self._turn, self._conversations, self._answers = turn, conversations, answers

    def __call__(self, made: DraftPass) -> None:
        """Record one pass."""
        draft = self._draft
        assert draft.embed_tokens is not None
        x = draft.layers[0].attention_input(draft.embed_tokens(made.token_ids), made.hidden)  # type: ignore[operator]
        self.by_step += [0] * (made.step + 1 - len(self.by_step))
        for row, (request, width) in enumerate(zip(made.requests, made.widths, strict=True)):
            conversation = self._conversations[request]
            self.by_step[made.step] += width
            inputs = x[row, :width]
            if not self._is_held_out(conversation):
                self._count(inputs.float().cpu())
            if conversation // HELD_OUT_EVERY % self._stride[self._is_held_out(conversation)] == 0:
                self._keep(request, made, row, inputs[:, : draft.config.hidden_size])

    def _is_held_out(self, conversation: int) -> bool:
        return self._holds_out and conversation % HELD_OUT_EVERY == 0

    def _count(self, inputs: Tensor) -> None:
        self._pending.append(inputs)
        self._num_pending += len(inputs)
        if self._num_pending >= _BLOCK:
            self._flush()

    def _flush(self) -> None:
        if self._num_pending:
            x = torch.cat(self._pending)
            self._moment += x.T @ x
            self._sum += x.double().sum(0)
            self.num_moments += len(x)
        self._pending, self._num_pending = [], 0

    def _keep(self, request: int, made: DraftPass, row: int, embeds: Tensor) -> None:
        text = self._texts.setdefault((self._conversations[request], self._turn), _Text())
        room = min(LONGEST_STRETCH - text.count, len(embeds))
        if room <= 0:
            return
        text.embeds.append(embeds[:room].to("cpu", torch.bfloat16, copy=True))
        text.hidden.append(made.hidden[row, :room].to("cpu", torch.bfloat16, copy=True))
        text.positions.append(made.positions[row, :room].to("cpu", torch.int32, copy=True))
        text.steps.append(torch.full((room,), made.step, dtype=torch.int32))
        text.token_ids.append(made.token_ids[row, :room].to("cpu", torch.int32, copy=True))
        text.answer.append(self._is_answer(request, made.step, text.positions[-1]))
        text.count += room
        held_out = self._is_held_out(self._conversations[request])
        self._kept[held_out] += room
        while self._kept[held_out] > self._room[held_out] and self._last(held_out) >= HELD_OUT_EVERY:
            self._thin_out(held_out)

    def _is_answer(self, request: int, step: int, positions: Tensor) -> Tensor:
        """Whether the target wrote the token after each position; a drafted token is the draft's."""
        ranges = self._answers[request] if self._answers and not step else ()
        return torch.tensor([any(p in part for part in ranges) for p in positions.tolist()], dtype=torch.bool)

    def _last(self, held_out: bool) -> int:
        return max(key[0] for key in self._texts if self._is_held_out(key[0]) == held_out)

    def _thin_out(self, held_out: bool) -> None:
        self._stride[held_out] *= 2
        for key in list(self._texts):
            is_spare = key[0] // HELD_OUT_EVERY % self._stride[held_out] > 0
            if is_spare and self._is_held_out(key[0]) == held_out:
                self._kept[held_out] -= self._texts.pop(key).count

    @property
    def is_full(self) -> bool:
        """It keeps as many activations as it may: what comes now takes the place of others."""
        return self._stride[False] > 1 or self._kept[False] >= self._room[False]

    def averages(self) -> tuple[Tensor, Tensor]:
        """Second moment and mean of what was counted, float32."""
        self._flush()
        count = max(self.num_moments, 1)
        return (self._moment / count).float(), (self._sum / count).float()

    def stretches(self) -> tuple[Stretch, ...]:
        """What was kept, in the order of conversations."""
        return tuple(
            Stretch(
                torch.cat(text.embeds),
                torch.cat(text.hidden),
                torch.cat(text.positions),
                torch.cat(text.steps),
                self._is_held_out(conversation),
                torch.cat(text.token_ids),
                torch.cat(text.answer),
            )
            for (conversation, _), text in sorted(self._texts.items())
        )


def attention_by_distance(
    weights: AttentionWeights, rope: RopeSpec, samples: Sequence[Sample], most: int = DISTANCE_QUERIES
) -> tuple[Tensor, int]:
    """How much attention each head pays to each distance, averaged over queries.

    Args:
        weights: of the layer, float32.
        rope: with frequencies.
        samples: activations.
        most: queries to look at.

    Returns:
        The mass by query head and distance, float64, shape (N, longest distance + 1), each head's summing
        to one; and the queries.
    """
    mass = torch.zeros(weights.num_heads, 1, dtype=torch.float64)
    queries = 0
    for sample in samples:
        if queries >= most:
            break
        x = sample.x.to(weights.q.dtype)
        logits = attention_logits(weights, rope, x, sample.positions)
        visible = sample.visible
        assert visible is not None
        distances = (sample.positions[:, None] - sample.positions).clamp_min(0).long()
        mass = torch.nn.functional.pad(mass, (0, max(int(distances.max()) + 1 - mass.shape[1], 0)))
        for head, row in zip(mass, logits, strict=True):
            attention = row.masked_fill(~visible, -torch.inf).softmax(-1).double()
            head += torch.bincount(distances.flatten(), attention.flatten(), minlength=len(head))
        queries += len(x)
    return mass / mass.sum(1, keepdim=True) if queries else mass, queries
