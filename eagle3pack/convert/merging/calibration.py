"""Calibration files: what a draft's attention reads while it speculates, made once and used anywhere.

A safetensors file: averages over all tokens, and activations of some stretches of text for refits.
Its metadata hold one JSON document, schemas/calibration.schema.json. Shape letters: draft/config.py, In as in
`attention`, E activations and S stretches in all.

    second_moment    (In, In) F32   E[x x'] of the attention input
    mean             (In,) F32      E[x]
    distance_mass    (N, any) F64   attention of each query head by distance, sums to 1; may be absent
    embeds, hidden   (E, H) BF16    normed token embeddings, and hidden states before hidden_norm
    positions, steps (E,) I32       place in the text, and speculative step (0: true states)
    token_ids        (E,) I32       the token that each position is paired with: the one after it, or the
                                    drafted one; absent in files of earlier versions
    answer           (E,) U8        1 where the target wrote that token: where a draft may be replayed
    lengths          (S,) I64       activations of each stretch, in order
    held_out         (S,) U8        1 where averages and refits leave the stretch alone
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from eagle3pack.checkpoint.as_torch import load_tensor, save_tensors
from eagle3pack.checkpoint.header import Header, TensorEntry, read_header
from eagle3pack.checkpoint.reading import iter_blocks
from eagle3pack.convert.merging.moments import Moments, Sample
from eagle3pack.documents import parse_json_object, require_valid, to_json
from eagle3pack.draft.config import DraftConfig
from eagle3pack.errors import InputError

SCHEMA = "eagle3pack/calibration/1"
METADATA_KEY = "eagle3pack_calibration"
_FIGURES_OF_A_RUN = ("output_tokens", "mean_accepted_length")
_ROWS = 512  # of the second moment at a time


@dataclass(frozen=True, slots=True)
class Stretch:
    """Activations of one text, in the order in which the draft read them.

    Attributes:
        embeds: token embeddings after input_layernorm, (T, H), bfloat16.
        hidden: hidden states before hidden_norm, (T, H), bfloat16.
        positions, steps: int32, (T,).
        held_out: nothing was fitted to it.
        token_ids: what was embedded, in the target's ids, int32, (T,); None where the file is an old one.
        answer: whether the target wrote that token, bool, (T,); never of drafted ones.
    """

    embeds: Tensor
    hidden: Tensor
    positions: Tensor
    steps: Tensor
    held_out: bool
    token_ids: Tensor | None = None
    answer: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration file in memory.

    Attributes:
        document: what it was made of; follows schemas/calibration.schema.json.
        second_moment, mean: float32, (In, In) and (In,).
        distance_mass: float64, (N, distances), of an old file (distances,); or None.
        stretches: activations.
    """

    document: Mapping[str, Any]
    second_moment: Tensor
    mean: Tensor
    distance_mass: Tensor | None
    stretches: tuple[Stretch, ...]

    def moments(self, hidden_norm: Tensor, eps: float, *, norm_before_residual: bool = False) -> Moments:
        """What merging needs of it.

        Args:
            hidden_norm: weight of the draft's norm on hidden states, (H,).
            eps: of that norm.
            norm_before_residual: the residual is the normed hidden state.
        """
        fitted, held_out = (
            _Samples(
                tuple(stretch for stretch in self.stretches if stretch.held_out == chosen),
                hidden_norm.float(),
                eps,
                norm_before_residual,
            )
            for chosen in (False, True)
        )
        tokens = self.document["tokens"]["moments"]
        return Moments(self.second_moment, self.mean, self.distance_mass, fitted, tokens, held_out)


@dataclass(frozen=True, slots=True)
class _Samples(Sequence[Sample]):
    """Stretches as samples, each made when it is asked for: activations are large, and held once."""

    stretches: tuple[Stretch, ...]
    hidden_norm: Tensor
    eps: float
    norm_before_residual: bool

    def __len__(self) -> int:
        return len(self.stretches)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> _Samples: ...
    def __getitem__(self, index: int | slice) -> Sample | _Samples:
        if isinstance(index, slice):
            return replace(self, stretches=self.stretches[index])
        stretch = self.stretches[index]
        hidden = stretch.hidden.float()
        normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps) * self.hidden_norm
        x = torch.cat([stretch.embeds, normed.bfloat16()], dim=-1)
        residual = normed.bfloat16() if self.norm_before_residual else stretch.hidden
        return Sample(
            x, stretch.positions, visibility(stretch.positions, stretch.steps), stretch.steps, residual
        )


def visibility(positions: Tensor, steps: Tensor) -> Tensor:
    """What each entry of a draft's cache sees, bool, (T, T).

    The entry of step s at position p belongs to the round whose last true state stands at p - s: it
    sees the true states up to there, and the fed-back ones of its own round up to itself.

    Args:
        positions, steps: integer, (T,).
    """
    rounds = positions - steps
    true = (steps == 0) & (positions <= rounds[:, None])
    same_round = (steps > 0) & (steps <= steps[:, None]) & (rounds == rounds[:, None])
    return true | same_round


def attention_digest(sources: Mapping[str, TensorEntry]) -> str:
    """What a calibration is bound to: the first layer's attention and all that shapes its input.

    Names of files, other tensors and the layout of names do not matter.

    Args:
        sources: the draft's tensors by logical name.
    """
    digest = hashlib.sha256()
    for name in sorted(sources):
        if name.startswith(
            ("layers.0.self_attn.", "layers.0.input_layernorm.", "layers.0.hidden_norm.", "fc.")
        ):
            entry = sources[name]
            digest.update(json.dumps([name, entry.dtype, list(entry.shape)]).encode())
            for block in iter_blocks(entry):
                digest.update(block)
    return digest.hexdigest()


def require_same_draft(calibration: Calibration, config: DraftConfig, sha256: str, *, where: str) -> None:
    """Refuse a calibration that was made for another draft.

    Args:
        calibration: to be used.
        config, sha256: the draft's config and `attention_digest`.
        where: the calibration file.

    Raises:
        InputError: heads, widths or weights differ, or it holds tokens that the draft does not know.
    """
    draft = calibration.document["draft"]
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"):
        if draft[key] != getattr(config, key):
            raise InputError(
                f"was made for a draft whose {key} is {draft[key]}, this one has {getattr(config, key)}",
                where=where,
            )
    if draft["attention_sha256"] != sha256:
        raise InputError(
            f"was made for another draft ({draft['id']}): the attention's weights differ",
            where=where,
            hint="Calibrate this one with --calibrate-with.",
        )
    for stretch in calibration.stretches:
        if stretch.token_ids is not None and int(stretch.token_ids.max()) >= config.vocab_size:
            raise InputError(
                f"holds token {int(stretch.token_ids.max())}, the draft's vocabulary has {config.vocab_size}",
                where=f"{where}: token_ids",
            )


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration file, complete or not at all.

    Raises:
        PermissionDenied: the place cannot be written.
        TransportError: the disk is full, or broken.
    """
    stretches = calibration.stretches
    width = calibration.document["draft"]["hidden_size"]
    none = torch.empty(0, width, dtype=torch.bfloat16), torch.empty(0, dtype=torch.int32)
    tensors = {
        "second_moment": calibration.second_moment,
        "mean": calibration.mean,
        "embeds": torch.cat([none[0], *(s.embeds for s in stretches)]),
        "hidden": torch.cat([none[0], *(s.hidden for s in stretches)]),
        "positions": torch.cat([none[1], *(s.positions for s in stretches)]),
        "steps": torch.cat([none[1], *(s.steps for s in stretches)]),
        "lengths": torch.tensor([len(s.positions) for s in stretches], dtype=torch.int64),
        "held_out": torch.tensor([s.held_out for s in stretches], dtype=torch.uint8),
    }
    if calibration.distance_mass is not None:
        tensors["distance_mass"] = calibration.distance_mass
    token_ids = [s.token_ids for s in stretches if s.token_ids is not None]
    answer = [s.answer for s in stretches if s.answer is not None]
    if stretches and len(token_ids) == len(answer) == len(stretches):  # not merged with an old one
        tensors |= {"token_ids": torch.cat(token_ids), "answer": torch.cat(answer).to(torch.uint8)}
    save_tensors(path, tensors, {METADATA_KEY: to_json(calibration.document)})


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file, trusting nothing that it says.

    Raises:
        InputError: it is none, or its tensors do not fit each other.
        PermissionDenied: it may not be read.
    """
    header = read_header(path)
    if METADATA_KEY not in header.metadata:
        raise InputError(
            "is no calibration",
            where=str(path),
            hint="Make one with --calibrate-with and --save-calibration.",
        )
    document = parse_json_object(header.metadata[METADATA_KEY].encode(), where=f"{path} (metadata)")
    require_valid(document, "calibration", where=f"{path} (metadata)")
    return _assembled(document, _tensors(header, document["draft"]), where=str(path))


def _tensors(header: Header, draft: Mapping[str, Any]) -> dict[str, Tensor]:
    """The file's tensors, their dtypes and shapes as documented."""
    hidden = draft["hidden_size"]
    entries = {entry.name: entry for entry in header.tensors}
    count = entries["positions"].shape[0] if "positions" in entries and entries["positions"].shape else 0
    stretches = entries["lengths"].shape[0] if "lengths" in entries and entries["lengths"].shape else 0
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "second_moment": ("F32", (2 * hidden, 2 * hidden)),
        "mean": ("F32", (2 * hidden,)),
        "embeds": ("BF16", (count, hidden)),
        "hidden": ("BF16", (count, hidden)),
        "positions": ("I32", (count,)),
        "steps": ("I32", (count,)),
        "lengths": ("I64", (stretches,)),
        "held_out": ("U8", (stretches,)),
    }
    if "distance_mass" in entries:
        mass = entries["distance_mass"].shape
        by_head = (draft["num_attention_heads"],) if len(mass) == 2 else ()
        expected["distance_mass"] = ("F64", (*by_head, max(mass[-1:], default=0) or 1))
    if "token_ids" in entries:
        expected |= {"token_ids": ("I32", (count,)), "answer": ("U8", (count,))}
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape) in expected.items():
        where = f"{header.path}: {name}"
        if name not in entries:
            raise InputError("is missing from the calibration", where=where)
        entry = entries[name]
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise InputError(
                f"is {entry.dtype} {list(entry.shape)}, expected {dtype} {list(shape)}", where=where
            )
        tensors[name] = load_tensor(entry)
        if entry.nbytes and not all(bool(x.isfinite()) for x in tensors[name].aminmax()):
            raise InputError("holds NaN or infinity", where=where)
    return tensors


def _assembled(document: Mapping[str, Any], tensors: Mapping[str, Tensor], *, where: str) -> Calibration:
    """Stretches cut apart, every number checked that is used as an index or a weight."""
    lengths, positions, steps = tensors["lengths"], tensors["positions"], tensors["steps"]
    if bool((lengths < 1).any()) or int(lengths.sum()) != len(positions):
        raise InputError(f"lengths do not add up to {len(positions)} activations", where=where)
    if bool((steps < 0).any()) or bool((positions < steps).any()):
        raise InputError("an activation stands before the start of its text", where=where)
    token_ids, answer = tensors.get("token_ids"), tensors.get("answer")
    if token_ids is not None and bool((token_ids < 0).any()):
        raise InputError("token_ids holds a negative id", where=where)
    if answer is not None and bool(((answer > 1) | (answer == 1) & (steps > 0)).any()):
        raise InputError("answer holds something other than 0 and 1, or a 1 at a drafted token", where=where)
    moment, mass = _symmetrised(tensors["second_moment"], where=where), tensors.get("distance_mass")
    if bool((moment.diagonal() < 0).any()):
        raise InputError("second_moment has a negative diagonal", where=where)
    if mass is not None and (bool((mass < 0).any()) or not bool((mass.sum(-1) > 0).all())):
        raise InputError("distance_mass is no distribution", where=where)
    ends = lengths.cumsum(0).tolist()
    cuts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    embeds, hidden = tensors["embeds"], tensors["hidden"]
    stretches = tuple(
        Stretch(
            embeds[cut],
            hidden[cut],
            positions[cut],
            steps[cut],
            bool(held_out),
            None if token_ids is None else token_ids[cut],
            None if answer is None else answer[cut].bool(),
        )
        for cut, held_out in zip(cuts, tensors["held_out"].tolist(), strict=True)
    )
    for stretch in stretches:
        true = stretch.positions[stretch.steps == 0]
        if stretch.answer is not None and not torch.equal(true, torch.arange(len(true), dtype=torch.int32)):
            raise InputError("the true states of a text do not stand at 0, 1, 2, ...", where=where)
    return Calibration(document, moment, tensors["mean"], mass, stretches)


def _symmetrised(moment: Tensor, *, where: str) -> Tensor:
    """The matrix, in place and exactly symmetric, if it was so up to rounding; some rows at a time."""
    size = max(float(x.abs()) for x in moment.aminmax())
    for start in range(0, len(moment), _ROWS):
        rows, columns = moment[start : start + _ROWS], moment[:, start : start + _ROWS].T
        if not torch.allclose(rows, columns, rtol=1e-3, atol=1e-5 * size + 1e-30):
            raise InputError("second_moment is not symmetric", where=where)
        average = (rows + columns) / 2
        rows.copy_(average)
        columns.copy_(average)
    return moment


def merge_calibrations(calibrations: Sequence[Calibration]) -> Calibration:
    """Put calibrations of one draft and target together, each weighted by its tokens.

    Raises:
        InputError: they were made for different drafts or targets.
    """
    first, *others = calibrations
    if not others:
        return first
    documents = [calibration.document for calibration in calibrations]
    for document in documents[1:]:
        if document["draft"]["attention_sha256"] != first.document["draft"]["attention_sha256"]:
            raise InputError("they were made for different drafts", where="--calibration")
        if document["target"] != first.document["target"]:
            names = " and ".join(str(d["target"]["id"]) for d in (first.document, document))
            raise InputError(f"they were made with different targets: {names}", where="--calibration")
    by_step = [document["tokens"]["by_step"] for document in documents]
    tokens = {
        key: sum(document["tokens"][key] for document in documents)
        for key in ("moments", "activations", "held_out", "distances")
    }
    tokens["by_step"] = [
        sum(counts[step] for counts in by_step if step < len(counts))
        for step in range(max(map(len, by_step)))
    ]
    prompts = [prompts for document in documents for prompts in document["prompts"]]
    generation = {
        key: value for key, value in first.document["generation"].items() if key not in _FIGURES_OF_A_RUN
    }
    weights = [document["tokens"]["moments"] / max(tokens["moments"], 1) for document in documents]
    return replace(
        first,
        document={**first.document, "prompts": prompts, "generation": generation, "tokens": tokens},
        second_moment=sum(
            (w * c.second_moment for w, c in zip(weights, calibrations, strict=True)), torch.zeros(1)
        ),
        mean=sum((w * c.mean for w, c in zip(weights, calibrations, strict=True)), torch.zeros(1)),
        distance_mass=_merged_mass(calibrations),
        stretches=tuple(stretch for calibration in calibrations for stretch in calibration.stretches),
    )


def _merged_mass(calibrations: Sequence[Calibration]) -> Tensor | None:
    measured = [(c.document["tokens"]["distances"], c.distance_mass) for c in calibrations]
    known = [(tokens, mass) for tokens, mass in measured if mass is not None]
    if not known:
        return None
    longest = max(mass.shape[-1] for _, mass in known)
    total = sum(
        (tokens * torch.nn.functional.pad(mass, (0, longest - mass.shape[-1])) for tokens, mass in known),
        torch.zeros(1, dtype=torch.float64),
    )
    return total / total.sum(-1, keepdim=True)
