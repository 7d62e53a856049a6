"""Train a merged attention layer until it says what the source's layer said, and nothing else.

Layer-local distillation: q, k, v and o (and their biases) of the merged layer are trained on calibration
activations to give the attention output of the source's layer. The inputs are the source draft's own, in
every speculative step (teacher forcing), so one layer is all that runs, and neither target nor head.

What is not trained: the norms before the layer, because their weights are scales on the columns of q, k
and v, which are; o_proj's bias, which no merge touches; norms on queries and keys unless asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights
from eagle3pack.convert.merging.heal_state import HealState, fingerprint
from eagle3pack.convert.merging.lessons import Lesson, batches, energy, lessons_of, require_sample
from eagle3pack.convert.merging.moments import Sample
from eagle3pack.convert.merging.ridge import HELD_OUT
from eagle3pack.convert.merging.rotary import RopeSpec
from eagle3pack.errors import InputError, UsageError

TRAINED = ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias")
NORMS = ("q_norm", "k_norm")
SMALLEST_SCALE = 1e-3  # of the values of a tensor that is (nearly) zero, as Adafactor's (arXiv:1804.04235)
CHECKS = 20  # looks at held-out samples, by default


@dataclass(frozen=True, slots=True)
class HealOptions:
    """How to train.

    Attributes:
        steps: of the optimiser.
        learning_rate: its peak, as a share of the root mean square of each tensor's starting values, where
            the start is all wrong. A better start has a shorter way to go: the rate shrinks with the root
            of its held-out error.
        warm_up: share of the steps over which the rate rises; then it falls to zero along a cosine.
        weight_decay: of AdamW.
        batch_tokens: a step takes samples until it has this many tokens, and at least one.
        check_every: steps between two looks at held-out samples; 0 for 20 looks in all.
        seed: of the order of samples, which is all there is to chance.
        train_norms: norms on queries and keys as well.
        norm_eps: of these norms.
        device: where to compute, as torch names it.
    """

    steps: int
    learning_rate: float = 0.01
    warm_up: float = 0.1
    weight_decay: float = 0.01
    batch_tokens: int = 2048
    check_every: int = 0
    seed: int = 0
    train_norms: bool = False
    norm_eps: float = 1e-6
    device: str = "cpu"

    def interval(self) -> int:
        """Steps between two looks at held-out samples."""
        return self.check_every or max(1, self.steps // CHECKS)

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        warm = max(1, round(self.warm_up * self.steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.learning_rate * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, slots=True)
class HealReport:
    """How the training did. Errors are |difference|^2 / |output|^2 of the attention block.

    Attributes:
        steps: that were asked for.
        best_step: after which the weights were best; 0 where none were better than the start.
        error_before, error_after: on held-out samples, in the dtype in which weights are stored.
        num_tokens, held_out_tokens: trained on, and held out.
        checks: (step, error on the samples since the last check, held-out error).
        stopped_at: the step in which numbers overflowed, or None.
    """

    steps: int
    best_step: int
    error_before: float
    error_after: float
    num_tokens: int
    held_out_tokens: int
    checks: tuple[tuple[int, float, float], ...]
    stopped_at: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return asdict(self) | {"checks": [list(check) for check in self.checks]}


@dataclass(frozen=True, slots=True)
class Healed:
    """The best weights, in the dtype of the start, and how they were reached."""

    weights: AttentionWeights
    report: HealReport


@dataclass(frozen=True, slots=True)
class HealProgress:
    """Where the training stands.

    Attributes:
        step, steps: done, and asked for.
        error: of this step's samples, before the step.
        best_error: on held-out samples, so far.
        tokens_per_second: since the training (re)started.
    """

    step: int
    steps: int
    error: float
    best_error: float
    tokens_per_second: float


def _ignore(_: object) -> None:
    return


def heal(
    source: AttentionWeights,
    start: AttentionWeights,
    rope: RopeSpec,
    samples: Sequence[Sample],
    options: HealOptions,
    held_out: Sequence[Sample] = (),
    *,
    on_begin: Callable[[int], None] = _ignore,
    on_step: Callable[[HealProgress], None] = _ignore,
    on_state: Callable[[HealState], None] = _ignore,
    resumed: HealState | None = None,
    resumed_from: str = "state of the training",
) -> Healed:
    """Train a merged layer towards its source.

    Deterministic on a CPU for a seed, a version of torch and a number of threads.

    Args:
        source: the layer before the merge.
        start: after it.
        rope: with frequencies.
        samples: activations.
        options: how.
        held_out: activations that choose among the steps; without any, every tenth of `samples` does (the
            only one, if there is one), as for the ridge.
        on_begin: told how many steps are done already, once nothing is left to refuse.
        on_step: told after every step.
        on_state: given all that a later call needs to go on from here, after every check; the training
            changes it again, so keep it in a file (see `heal_state`).
        resumed: what was kept of a call with the same arguments; the device may differ.
        resumed_from: where that was kept, for messages.

    Returns:
        The weights that did best on held-out samples: never worse there than `start`, which they are
        where no step helped.

    Raises:
        UsageError: options out of range, or no samples.
        InputError: shapes that do not fit, NaN or infinity, a token that sees nothing, or a state of
            another run.
    """
    _require_options(options, rope)
    _require_fits(source, start, samples, held_out)
    if not held_out:
        held_out = samples[::HELD_OUT]
        samples = [sample for i, sample in enumerate(samples) if i % HELD_OUT] or held_out
    made_with = fingerprint(source, start, rope, samples, held_out, replace(options, device=""))
    if resumed is not None and resumed.fingerprint != made_with:
        raise InputError(
            "belongs to another run: the draft, the calibration or the options differ",
            where=resumed_from,
            hint="Give the options of that run, or a file that does not exist yet.",
        )
    train, check = (
        lessons_of(source, rope, part, torch.device(options.device), options.norm_eps)
        for part in (samples, held_out)
    )
    training = _Training(start, rope, options, train, check)
    if resumed is None:
        training.begin(made_with)
    else:
        training.resume(resumed)
    on_begin(training.state.step)
    stopped_at = training.run(on_step, on_state)
    return training.result(stopped_at)


class _Training:
    """The weights in training, their optimiser, and the best state so far."""

    def __init__(
        self,
        start: AttentionWeights,
        rope: RopeSpec,
        options: HealOptions,
        train: Sequence[Lesson],
        held_out: Sequence[Lesson],
    ) -> None:
        self.start, self.rope, self.options = start, rope, options
        self.train, self.held_out = train, held_out
        self.device, self.work = torch.device(options.device), train[0].x.dtype
        names = TRAINED + (NORMS if options.train_norms else ())
        frozen = {name: tensor for name, tensor in start.tensors().items() if name not in names}
        self.parameters = {
            name: tensor.detach().to(self.device, self.work, copy=True).requires_grad_()
            for name, tensor in start.tensors().items()
            if name in names
        }
        moved = {name: tensor.to(self.device, self.work) for name, tensor in frozen.items()}
        self.weights = replace(start, **moved, **self.parameters)
        self.scales = [_scale(parameter) for parameter in self.parameters.values()]
        self.optimizer = torch.optim.AdamW(
            [{"params": [parameter]} for parameter in self.parameters.values()],
            lr=0.0,
            weight_decay=options.weight_decay,
        )
        tokens = sum(len(lesson.x) for lesson in train)
        self.energy = sum(energy(lesson.expected) for lesson in train) / tokens or 1.0  # a token

    def begin(self, made_with: str) -> None:
        """Start from the merged weights."""
        best = {name: self.start.tensors()[name] for name in self.parameters}
        before = self.held_out_error()
        self.state = HealState(made_with, 0, {}, {}, best, 0, before, before, [], [])

    def resume(self, state: HealState) -> None:
        """Go on from a saved state."""
        self.state = state
        if state.step == 0:
            return
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state.weights[name])
        self.optimizer.load_state_dict(state.optimizer)

    def run(
        self, on_step: Callable[[HealProgress], None], on_state: Callable[[HealState], None]
    ) -> int | None:
        """Take the steps that are left; the step that broke down, if one did."""
        options, tokens, began = self.options, 0, time.monotonic()
        lengths = [len(lesson.x) for lesson in self.train]
        drawn = batches(lengths, options.batch_tokens, options.seed)  # nothing about chance has to be saved
        for step, chosen in enumerate(islice(drawn, self.state.step, options.steps), self.state.step):
            batch = [self.train[i] for i in chosen]
            error = self.step(batch, options.rate(step))
            if not math.isfinite(error):
                return step + 1
            self.state.errors.append(error)
            tokens += sum(len(lesson.x) for lesson in batch)
            last = step + 1 == options.steps
            if last or (step + 1) % options.interval() == 0:
                self.check(step + 1)
                on_state(self.state)
            rate = tokens / max(time.monotonic() - began, 1e-9)
            on_step(HealProgress(step + 1, options.steps, error, self.state.best_error, rate))
        return None

    def step(self, batch: Sequence[Lesson], rate: float) -> float:
        """One step of the optimiser; the relative error of the batch, NaN where nothing could be done."""
        tokens = sum(len(lesson.x) for lesson in batch)
        error = 0.0
        self.optimizer.zero_grad()
        for lesson in batch:
            loss = self._difference(self.weights, lesson).square().sum() / (self.energy * tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            error += loss.item()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return math.nan
        for group, scale in zip(self.optimizer.param_groups, self.scales, strict=True):
            group["lr"] = rate * scale * min(self.state.error_before, 1.0) ** 0.5
        self.optimizer.step()
        return error

    def check(self, step: int) -> None:
        """Look at held-out samples, and remember the weights if they are the best."""
        state = self.state
        error = self.held_out_error()
        state.checks.append((step, sum(state.errors) / len(state.errors), error))
        state.errors.clear()
        state.step, state.optimizer = step, self.optimizer.state_dict()
        state.weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        if error < state.best_error:  # never true of NaN
            state.best_step, state.best_error = step, error
            state.best = {name: self._stored(name).cpu() for name in self.parameters}

    def held_out_error(self) -> float:
        """Relative error on held-out samples of the weights as they would be stored."""
        stored = {name: self._stored(name).to(self.work) for name in self.parameters}
        weights = replace(self.weights, **stored)
        with torch.no_grad():
            lost = sum(energy(self._difference(weights, lesson)) for lesson in self.held_out)
        return lost / (sum(energy(lesson.expected) for lesson in self.held_out) or 1.0)

    def result(self, stopped_at: int | None) -> Healed:
        """The best weights, and the report."""
        state = self.state
        report = HealReport(
            steps=self.options.steps,
            best_step=state.best_step,
            error_before=state.error_before,
            error_after=state.best_error,
            num_tokens=sum(len(lesson.x) for lesson in self.train),
            held_out_tokens=sum(len(lesson.x) for lesson in self.held_out),
            checks=tuple(state.checks),
            stopped_at=stopped_at,
        )
        return Healed(replace(self.start, **state.best), report)

    def _stored(self, name: str) -> Tensor:
        return self.parameters[name].detach().to(self.start.tensors()[name].dtype, copy=True)

    def _difference(self, weights: AttentionWeights, lesson: Lesson) -> Tensor:
        lesson = lesson.to(self.device)
        return lesson.output(weights, self.rope, self.options.norm_eps) - lesson.expected


def _scale(parameter: Tensor) -> float:
    """Root mean square of a tensor's values."""
    return max(float(parameter.detach().square().mean().sqrt()), SMALLEST_SCALE)


def _require_options(options: HealOptions, rope: RopeSpec) -> None:
    checks = (
        ("steps", options.steps, options.steps >= 1, "at least 1"),
        ("learning rate", options.learning_rate, 0 < options.learning_rate < math.inf, "a positive number"),
        ("warm-up", options.warm_up, 0 <= options.warm_up <= 1, "a share between 0 and 1"),
        ("weight decay", options.weight_decay, 0 <= options.weight_decay < math.inf, "0 or more"),
        ("tokens a batch", options.batch_tokens, options.batch_tokens >= 1, "at least 1"),
        ("steps between checks", options.check_every, options.check_every >= 0, "0 or more"),
    )
    for name, value, fits, expected in checks:
        if not fits:
            raise UsageError(f"{name} {value}, expected {expected}", where="heal")
    if rope.frequencies is None:
        raise UsageError(f"training runs the attention, and {rope.unknown}", where="heal")


def _require_fits(
    source: AttentionWeights,
    start: AttentionWeights,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
) -> None:
    if not samples:
        raise UsageError("needs calibration activations", where="heal")
    if source.q.shape != start.q.shape or source.o.shape != start.o.shape:
        raise InputError("the merged layer has other queries or outputs than its source", where="heal")
    if start.k.shape != start.v.shape or start.k.shape[1:] != source.k.shape[1:]:
        raise InputError("the merged layer has keys and values of other widths than its source", where="heal")
    if start.num_heads % start.num_key_value_heads:
        raise InputError(
            f"{start.num_heads} query heads over {start.num_key_value_heads} key/value heads", where="heal"
        )
    for layer, weights in (("source", source), ("merged layer", start)):
        for name, tensor in weights.tensors().items():
            if not bool(tensor.isfinite().all()):
                raise InputError(f"{name} of the {layer} holds NaN or infinity", where="heal")
    for kind, part in (("calibration", samples), ("held-out", held_out)):
        for index, sample in enumerate(part):
            require_sample(sample, source.q.shape[2], where=f"{kind} sample {index}")
