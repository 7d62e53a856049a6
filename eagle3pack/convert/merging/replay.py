"""How long a draft's proposals are accepted, on text that is known: no target runs.

Greedy text is the target's own whatever the draft. A draft whose attention was changed can therefore be
replayed on what the target wrote with the source: the same true states, the same rounds, its own
proposals and its own cache. That costs a thirtieth of the reference engine (engine.speculate) and counts
what it counts, but for the rounds in which the text ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3pack.checkpoint.as_torch import torch_dtype
from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.reading import read_part
from eagle3pack.convert.merging.attention import AttentionWeights, attend, project, project_output
from eagle3pack.convert.merging.calibration import Stretch, visibility
from eagle3pack.convert.merging.fidelity import Rest, rest_of
from eagle3pack.convert.merging.rotary import RopeSpec
from eagle3pack.draft.config import DraftConfig
from eagle3pack.engine.counters import Counters


@dataclass(frozen=True, slots=True)
class Text:
    """What a draft read of one answered prompt in speculative step 0, position by position.

    Attributes:
        token_ids: the token after each position, integer, (T,).
        hidden: hidden states before hidden_norm, (T, H).
        answer: the target wrote that token, bool, (T,).
    """

    token_ids: Tensor
    hidden: Tensor
    answer: Tensor


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A draft of one layer but for its attention.

    Attributes:
        embedding: token ids (T,) to rows of the embedding table, (T, H).
        input_layernorm, hidden_norm: (H,).
        rest: what follows the attention.
        d2t: offsets from the draft's ids to the target's, (Vd,), or None.
        norm_before_residual: the residual is the normed hidden state.
        norm_output: what is fed back has gone through the last norm.
    """

    embedding: Callable[[Tensor], Tensor]
    input_layernorm: Tensor
    hidden_norm: Tensor
    rest: Rest
    d2t: Tensor | None = None
    norm_before_residual: bool = False
    norm_output: bool = False

    def inputs(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input, (T, 2 H), and its residual, (T, H), float32."""
        normed = self.rest.normed(hidden.float(), self.hidden_norm)
        embeds = self.rest.normed(self.embedding(token_ids).float(), self.input_layernorm)
        return torch.cat([embeds, normed], dim=-1), normed if self.norm_before_residual else hidden.float()

    def propose(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy tokens in the target's ids, (T,), and the hidden states that are fed back, (T, H)."""
        hidden = self.rest.hidden(residual, attended)
        normed = self.rest.normed(hidden, self.rest.norm)
        ids = self.rest.logits(normed).argmax(-1)
        return ids if self.d2t is None else ids + self.d2t[ids], normed if self.norm_output else hidden


def surroundings(
    tensors: Mapping[str, Tensor], embedding: Callable[[Tensor], Tensor], config: DraftConfig
) -> Surroundings:
    """A draft but for its attention, from its tensors by logical name."""
    return Surroundings(
        embedding,
        tensors["layers.0.input_layernorm.weight"],
        tensors["layers.0.hidden_norm.weight"],
        rest_of(tensors, config.rms_norm_eps),
        tensors.get("d2t"),
        config.norm_before_residual,
        config.norm_output,
    )


@dataclass(frozen=True, slots=True)
class Replay:
    """Speculation on known texts.

    Attributes:
        texts: at least one.
        around: the draft but for its attention.
        rope: with frequencies.
        num_speculative_tokens: k.
    """

    texts: Sequence[Text]
    around: Surroundings
    rope: RopeSpec
    num_speculative_tokens: int

    def counters(self, attention: AttentionWeights) -> tuple[Counters, ...]:
        """What would have been counted of each text with this attention layer.

        A round counts if the answer goes on for all its k proposals. It does not where it is cut off, so
        that the last rounds of the engine are missing, whatever became of them.
        """
        return tuple(self._count(self._accepted(attention, text)) for text in self.texts)

    def _accepted(self, attention: AttentionWeights, text: Text) -> list[int | None]:
        """Proposals accepted of a round that starts at each position; None where none may.

        Only rounds whose proposals so far were all right go on to the next step: the others are decided.
        """
        truth, length = text.token_ids.long(), len(text.token_ids)
        going_on = _starts(text.answer, self.num_speculative_tokens)
        accepted = torch.full((length,), -1).index_fill_(0, going_on, 0)
        token_ids, hidden, added = truth, text.hidden, torch.arange(length)  # what a step adds to the cache
        asking = going_on  # of that, what proposes
        positions = steps = torch.empty(0, dtype=torch.long)
        keys = values = torch.empty(attention.num_heads, 0, attention.head_dim)
        for step in range(self.num_speculative_tokens):
            inputs, residual = self.around.inputs(token_ids, hidden)
            queries, *new = project(attention, self.rope, inputs, added, self.around.rest.eps)
            keys, values = (torch.cat(pair, dim=1) for pair in zip((keys, values), new, strict=True))
            positions, steps = torch.cat([positions, added]), torch.cat([steps, torch.full_like(added, step)])
            visible = visibility(positions, steps)[-len(added) :]
            mixed = attend(queries[:, asking], keys, values, visible[asking])
            proposed, feedback = self.around.propose(residual[asking], project_output(attention, mixed))
            right = proposed == truth[going_on + step + 1]
            going_on = going_on[right]
            accepted[going_on] += 1
            if not len(going_on):
                break
            token_ids, hidden, added = proposed[right], feedback[right], going_on + step + 1
            asking = torch.arange(len(added))
        return [None if count < 0 else count for count in accepted.tolist()]

    def _count(self, accepted: Sequence[int | None]) -> Counters:
        """Go through a text as the engine does: a round starts where the last one's tokens end."""
        drafts, position, by_position = 0, 0, [0] * self.num_speculative_tokens
        while position < len(accepted):
            count = accepted[position]
            if count is not None:
                drafts += 1
                for i in range(count):
                    by_position[i] += 1
            position += 1 + (count or 0)
        accepted_tokens, drafted = sum(by_position), drafts * self.num_speculative_tokens
        return Counters(drafts, drafted, accepted_tokens, tuple(by_position), drafts + accepted_tokens)


def _starts(answer: Tensor, num_speculative_tokens: int) -> Tensor:
    """Positions from which a round and the answer to all its proposals lie within the text."""
    if len(answer) <= num_speculative_tokens:
        return torch.empty(0, dtype=torch.long)
    return answer.unfold(0, num_speculative_tokens + 1, 1).all(1).nonzero().flatten()


def stored_rows(entry: TensorEntry) -> Callable[[Tensor], Tensor]:
    """Look rows of a stored matrix up without holding it: an embedding table can be gigabytes."""
    row_bytes, dtype = entry.nbytes // entry.shape[0], torch_dtype(entry)

    def look_up(rows: Tensor) -> Tensor:
        wanted = rows.tolist()
        found = {row: read_part(entry, row * row_bytes, row_bytes) for row in set(wanted)}
        return torch.stack([torch.frombuffer(found[row], dtype=dtype) for row in wanted])

    return look_up


def replayable(stretches: Sequence[Stretch], num_speculative_tokens: int) -> list[Text]:
    """The texts on which a draft can be replayed: those that keep enough of an answer for one round."""
    texts = []
    for stretch in stretches:
        if stretch.token_ids is not None and stretch.answer is not None:
            true = stretch.steps == 0
            text = Text(stretch.token_ids[true], stretch.hidden[true], stretch.answer[true])
            texts += [text] if len(_starts(text.answer, num_speculative_tokens)) else []
    return texts
