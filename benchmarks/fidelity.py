#!/usr/bin/env python3
"""How much of a draft each way of merging its heads keeps, on text that nothing was calibrated on.

    python benchmarks/fidelity.py --target TARGET [--draft DRAFT] [--heads 4 1] [--prompts FILE]
                                  [--all | --lost]

The target answers the prompts once, with the source draft, in the reference engine. As greedy text is the
target's own whatever the draft, every converted draft is then replayed on that text: same states of the
target, same rounds, the converted draft's own proposals and its own cache. That costs a thirtieth of
running the engine again for each, and the source's replay is held against the engine's own counters.

Prompts default to MT-Bench where EAGLE3PACK_MT_BENCH names its file, calibrated on the prompts that come
with this package; without it, to the second half of these, calibrated on the first. --all tries every
method, metric, grouping and refit; --lost merges keys alone, values alone and both, and tells errors by
speculative step. Writes fidelity.md, fidelity.json and fidelity.svg into --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle3pack.convert import calibrate
from eagle3pack.convert.command import ConvertOptions, run_convert
from eagle3pack.convert.merging.attention import AttentionWeights, from_matrices
from eagle3pack.convert.merging.calibration import Calibration, Stretch, read_calibration
from eagle3pack.convert.merging.capture import Recorder
from eagle3pack.convert.merging.fidelity import attention_outputs, compare
from eagle3pack.convert.merging.merge import Merged, MergeOptions, merge
from eagle3pack.convert.merging.metrics import IDENTITY, Metric, embedding_metric, norm_metric
from eagle3pack.convert.merging.moments import Moments, Sample
from eagle3pack.convert.merging.replay import Replay, replayable, surroundings
from eagle3pack.convert.merging.ridge import refit_output
from eagle3pack.convert.merging.rotary import RopeSpec, rope_spec
from eagle3pack.engine.chat import load_chat
from eagle3pack.engine.counters import (
    Counters,
    mean_accepted_length,
    per_position_accept_rate,
    retention,
    total,
)
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.generation import Generation, Settings
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.prompts import Prompt, read_prompts, shipped_prompts
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.statistics import retention_interval
from eagle3pack.engine.target import Target, load_target

QUICKSTART_DRAFT = Path(__file__).parents[1] / "examples" / "quickstart" / "draft"
K = 3
MOST_COMPARED = 2048  # activations at which attention and logits are compared; acceptance counts all texts


@dataclass(frozen=True)
class Way:
    """One way of merging."""

    method: str
    metric: str = "identity"
    grouping: str = "contiguous"
    refit: str = "own"
    only: str = ""

    def __str__(self) -> str:
        parts = [self.method]
        parts += [self.metric] if self.metric != "identity" else []
        parts += [self.grouping] if self.grouping != "contiguous" else []
        parts += [self.refit] if self.refit != "own" else []
        parts += [f"{self.only} only"] if self.only else []
        return ", ".join(parts)


DEFAULT_WAYS = (
    Way("mean"),
    Way("mean", "calibration", refit="ridge"),
    Way("procrustes"),
    Way("svd"),
    Way("als"),
    Way("als", "norm"),
    Way("als", "calibration"),
    Way("als", refit="ridge"),
    Way("als", "calibration", refit="ridge"),
    Way("als", "calibration", "similarity", "ridge"),
)

LOST_WAYS = tuple(
    Way("als", "calibration", grouping, refit, only)
    for grouping, only, refit in itertools.product(
        ("contiguous", "similarity"), ("keys", "values", ""), ("closed", "ridge")
    )
)


def all_ways() -> Iterator[Way]:
    """Everything that is not the same as something else."""
    yield Way("mean")
    yield Way("first")
    for refit, grouping in itertools.product(("closed", "ridge"), ("contiguous", "similarity")):
        yield Way("mean", "calibration", grouping, refit)
    metrics = ("identity", "norm", "embedding", "calibration")
    for method, metric, grouping in itertools.product(
        ("procrustes", "svd", "als"), metrics, ("contiguous", "similarity")
    ):
        yield Way(method, metric, grouping)
        yield Way(method, metric, grouping, "ridge")


class Merger:
    """Merges the source's attention in every way."""

    def __init__(self, draft: DraftModel, moments: Moments, rope: RopeSpec) -> None:
        config = draft.config
        state = draft.state_dict()
        prefix = "layers.0.self_attn."
        matrices = {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}
        self.weights = from_matrices(matrices, config.head_dim)
        self.rope, self.moments = rope, moments
        norms = [state["layers.0.input_layernorm.weight"], state["layers.0.hidden_norm.weight"]]
        self._metrics: dict[str, Metric] = {
            "identity": IDENTITY,
            "norm": norm_metric(*norms),
            "calibration": moments.metric(),
        }
        self._embedding = (state["embed_tokens.weight"], *norms), state.get("fc.weight"), config.rms_norm_eps
        self._max_distance = min(config.max_position_embeddings or 32768, 32768)

    def half_merged(self, way: Way, count: int) -> Merged:
        """Keys and queries of the merge with the source's values and o_proj, or the other way round."""
        whole = self.merged(replace(way, refit="closed", only=""), count)
        order, shared = torch.tensor(whole.report.query_order), whole.weights
        k, v = (x.repeat_interleave(shared.queries_per_head, 0) for x in (shared.k, shared.v))
        source = self.weights
        if way.only == "keys":
            half = replace(shared, k=k, v=source.v[order], o=source.o[:, order])
        else:
            half = replace(shared, k=source.k[order], q=source.q[order], v=v)
        if way.refit == "ridge":
            o, _ = refit_output(source, half, self.rope, self.moments.samples, self.moments.held_out)
            half = replace(half, o=o.to(half.o.dtype))
        return replace(whole, weights=half)

    def merged(self, way: Way, count: int) -> Merged:
        if way.only:
            return self.half_merged(way, count)
        if way.metric == "embedding" and "embedding" not in self._metrics:
            tensors, fc, eps = self._embedding
            self._metrics["embedding"] = embedding_metric(*tensors, fc=fc, eps=eps)
        options = MergeOptions(
            count,
            way.method,  # type: ignore[arg-type]
            None if way.refit == "own" else way.refit,  # type: ignore[arg-type]
            way.grouping,  # type: ignore[arg-type]
            self._max_distance,
        )
        moments = self.moments
        if way.metric != "calibration":  # a ridge alone: measured distances belong to the metric
            moments = replace(moments, distance_mass=None)
        return merge(self.weights, self.rope, options, self._metrics[way.metric], moments)


def errors_by_step(
    source: AttentionWeights, merged: AttentionWeights, rope: RopeSpec, samples: Sequence[Sample]
) -> list[float]:
    """Output errors at each speculative step."""
    y, other = (torch.cat(attention_outputs(weights, rope, samples)) for weights in (source, merged))
    steps = torch.cat([sample.steps for sample in samples if sample.steps is not None])
    lost, there = (other - y).square().sum(1), y.square().sum(1)
    return [float(lost[steps == step].sum() / there[steps == step].sum()) for step in range(K)]


def chosen_prompts(arguments: argparse.Namespace) -> tuple[list[Prompt], str, str]:
    """Prompts to measure on with their name, and what to calibrate with."""
    path = arguments.prompts or os.environ.get("EAGLE3PACK_MT_BENCH")
    if path:
        found = read_prompts(Path(path)).select(limit=arguments.limit)
        return list(found.prompts), f"first turns of {len(found.prompts)} prompts of {found.name}", "shipped"
    shipped = shipped_prompts().prompts
    half = arguments.out / "first-half.jsonl"
    half.write_text("\n".join(json.dumps({"turns": prompt.turns}) for prompt in shipped[::2]))
    rest = list(shipped[1::2])[: arguments.limit]
    return rest, f"every second prompt that comes with this package ({len(rest)})", str(half)


@contextmanager
def progress(label: str, total: int, *, unit: str = "B") -> Iterator[Callable[[int], None]]:
    """A line for every tenth."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        if (done + count) * 10 // total > done * 10 // total:
            note(f"{label}: {done + count} of {total} {unit} at most")
        done += count

    yield advance


def find_calibration(arguments: argparse.Namespace, prompts: str) -> Calibration:
    """Read it, or make it as `eagle3pack convert` does."""
    path = arguments.calibration or arguments.out / "calibration.safetensors"
    if not path.exists():
        calibrate.MAX_TOKENS = arguments.calibration_tokens
        options = ConvertOptions(
            num_kv_heads=1,
            target=str(arguments.target),
            method="svd",
            calibrate_with=prompts,
            save_calibration=path,
            dry_run=True,
        )
        run_convert(str(arguments.draft), str(arguments.out / "none"), options, say=note, progress=progress)
    return read_calibration(path)


def note(text: str) -> None:
    """Tell what happens, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, default=QUICKSTART_DRAFT)
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 4, 2, 1])
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--calibration-tokens", type=int, default=calibrate.MAX_TOKENS, help="an answer")
    parser.add_argument("--dtype", default="bfloat16", help="of target and draft in the engine")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--lost", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/fidelity"))
    return parser.parse_args()


def answer(
    target: Target, draft: DraftModel, folder: Path, prompts: Sequence[Prompt], max_tokens: int
) -> tuple[Generation, tuple[Stretch, ...]]:
    """Let target and source draft answer the first turns, and keep what the draft reads."""
    chat = load_chat(folder)
    asked = [prompt.token_ids or chat.prompt(prompt.turns[:1]) for prompt in prompts]
    recorder = Recorder(draft, 1, 10**9)
    recorder.start(0, range(len(asked)), [[range(len(prompt) - 1, sys.maxsize)] for prompt in asked])
    note(f"the target answers {len(asked)} prompts")
    settings = Settings(max_tokens, K, batch_size=16, stop_ids=chat.stop_ids)
    return generate(target, asked, settings, draft=draft, on_draft_pass=recorder), recorder.stretches()


def main() -> None:
    """Run it."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    prompts, prompts_name, to_calibrate = chosen_prompts(arguments)
    calibration = find_calibration(arguments, to_calibrate)
    target = load_target(arguments.target, dtype=getattr(torch, arguments.dtype))
    draft = load_draft(arguments.draft, target=target)
    made, stretches = answer(target, draft, arguments.target, prompts, arguments.max_tokens)
    exact = load_draft(arguments.draft, target=target).float()
    config = exact.config
    norm = exact.state_dict()["layers.0.hidden_norm.weight"], config.rms_norm_eps
    heard = replace(calibration, stretches=stretches)
    fresh = heard.moments(*norm, norm_before_residual=config.norm_before_residual).samples
    fresh = fresh[:: max(sum(len(sample.x) for sample in fresh) // MOST_COMPARED, 1)]
    rope = rope_spec(config.rope, config.head_dim, config.max_position_embeddings)
    merger, around = (
        Merger(exact, calibration.moments(*norm), rope),
        surroundings(exact.state_dict(), exact.embed_tokens, config),
    )
    replay = Replay(replayable(stretches, K), around, rope, K)
    engine = mean_accepted_length(total(made.counters))
    about = {
        "prompts": prompts_name,
        "max_tokens": arguments.max_tokens,
        "k": K,
        "dtype": arguments.dtype,
        "calibration": calibration.document,
        "engine": engine,
    }
    ways = tuple(all_ways()) if arguments.all else LOST_WAYS if arguments.lost else DEFAULT_WAYS
    with torch.inference_mode():
        source = replay.counters(merger.weights)
        rows = [row("source draft", config.num_key_value_heads, None, source, source)]
        note(f"mean accepted length of the source: engine {engine:.4f}, replay {rows[0]['length']:.4f}")
        for count, way in itertools.product(arguments.heads, ways):
            if count == 1 and way.grouping != "contiguous":
                continue  # one group has all heads, whatever its order
            start = time.process_time()
            merged = merger.merged(way, count)
            seconds = round(time.process_time() - start, 1)
            found = compare(
                merger.weights, merged.weights, rope, merged.report.query_order, fresh, lambda: around.rest
            )
            counters = replay.counters(merged.weights)
            rows.append(row(str(way), count, found.as_dict(), counters, source) | {"cpu_s": seconds})
            if arguments.lost:
                rows[-1]["by_step"] = errors_by_step(merger.weights, merged.weights, rope, fresh)
            note(f"{count} {way}: {rows[-1]['length']:.3f}, retained {rows[-1]['retention']:.3f}")
            write(arguments.out, about, rows)  # a long run that is stopped leaves what it has
    print(table(rows))


def write(out: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The three files."""
    (out / "fidelity.json").write_text(json.dumps({**about, "rows": rows}, indent=1))
    (out / "fidelity.md").write_text(table(rows))
    draw(rows, out / "fidelity.svg")


def row(
    name: str, count: int, found: dict[str, Any] | None, ours: Sequence[Counters], theirs: Sequence[Counters]
) -> dict[str, Any]:
    """One line of the table."""
    mine, other = total(ours), total(theirs)
    interval = retention_interval(ours, theirs)
    return {
        "heads": count,
        "way": name,
        **({} if found is None else found),
        "drafts": mine.drafts,
        "per_position": per_position_accept_rate(mine),
        "length": mean_accepted_length(mine),
        "retention": retention(mine, other),
        "interval": None if interval is None else [interval.low, interval.high],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| KV heads | method | output error | attention KL | logits KL | accepted at 1 / 2 / 3 | "
        "mean accepted length | retained (95 %) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in rows:
        errors = [line.get(key) for key in ("output_error", "attention_kl", "logits_kl")]
        accepted = " / ".join(f"{rate:.3f}" for rate in line["per_position"])
        low, high = line["interval"] or (float("nan"), float("nan"))
        by_step = " / ".join(f"{error:.3f}" for error in line.get("by_step", []))
        cells = [
            str(line["heads"]),
            line["way"] + (f" (by step {by_step})" if by_step else ""),
            *("" if error is None else f"{error:.3f}" for error in errors),
            accepted,
            f"{line['length']:.3f}",
            f"{line['retention']:.3f} ({low:.3f} to {high:.3f})" if errors[0] is not None else "1",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Retention by key/value heads, a line for each of the ways that are tried by default."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "eagle3pack"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2))
    drawn = set(map(str, DEFAULT_WAYS))
    measured = [line for line in rows if "output_error" in line and line["way"] in drawn]
    ways = list(dict.fromkeys(line["way"] for line in measured))
    counts = sorted({line["heads"] for line in measured}, reverse=True)
    for way in ways:
        mine = {line["heads"]: line for line in measured if line["way"] == way}
        here = [count for count in counts if count in mine]
        values = [mine[count]["retention"] for count in here]
        spread = [
            [max(value - mine[count]["interval"][0], 0) for value, count in zip(values, here, strict=True)],
            [max(mine[count]["interval"][1] - value, 0) for value, count in zip(values, here, strict=True)],
        ]
        places = [counts.index(count) + 0.04 * (ways.index(way) - len(ways) / 2) for count in here]
        axes.errorbar(
            places, values, yerr=spread, marker="o", markersize=4, capsize=2, linewidth=1, label=way
        )
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel("key/value heads after the conversion")
    axes.set_ylabel("accepted drafts retained, no retraining")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, ncols=2, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
