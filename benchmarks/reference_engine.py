#!/usr/bin/env python3
"""The reference engine beside transformers' own greedy generation, on a real target and a real draft.

    python benchmarks/reference_engine.py --target TARGET [--draft DRAFT] [--dtype bfloat16] [--threads 2]

At batch 1 the three ways take turns prompt by prompt, so that their ratio holds while the machine's
speed drifts. At batch 16 it tells what the engine spends outside the forwards of target and draft. One
JSON object on stdout. `tools/make_smollm2_target.py` builds the target of the draft in this repository.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle3pack.engine.chat import load_chat
from eagle3pack.engine.counters import mean_accepted_length, total
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.generation import Generation, Settings
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.prompts import read_prompts, shipped_prompts
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.target import Target, load_target

QUICKSTART_DRAFT = Path(__file__).parents[1] / "examples" / "quickstart" / "draft"
Output = list[int]


def one_by_one(
    target: Target, draft: DraftModel, prompts: list[list[int]], max_tokens: int
) -> dict[str, Any]:
    """Batch 1: seconds and tokens of each way, in turns."""
    settings = Settings(max_tokens=max_tokens, batch_size=1)

    def transformers(prompt: list[int]) -> Output:
        ids = torch.tensor([prompt], device=target.device)
        with torch.inference_mode():
            made = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=sorted(target.stop_ids),
                pad_token_id=min(target.stop_ids),
            )
        return list(made[0, len(prompt) :].tolist())

    ways: dict[str, Callable[[list[int]], Output]] = {
        "transformers": transformers,
        "engine": lambda prompt: list(generate(target, [prompt], settings).outputs[0]),
        "engine with draft": lambda prompt: list(
            generate(target, [prompt], settings, draft=draft).outputs[0]
        ),
    }
    seconds, tokens, same = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    for way in ways.values():
        way(prompts[0][:8])  # the first call of each is not what is measured
    for turn, prompt in enumerate(prompts):
        names = list(ways)
        outputs = {}
        for name in names[turn % 3 :] + names[: turn % 3]:
            start = time.perf_counter()
            outputs[name] = ways[name](prompt)
            seconds[name] += time.perf_counter() - start
            tokens[name] += len(outputs[name])
        for name in names:
            same[name] += outputs[name] == outputs["transformers"]
    return {
        name: {
            "tokens_per_s": round(tokens[name] / seconds[name], 2),
            "against_transformers": round(
                tokens[name] / seconds[name] * seconds["transformers"] / tokens["transformers"], 3
            ),
            "same_text": same[name],
        }
        for name in ways
    }


def summary(made: Generation) -> dict[str, Any]:
    """A batched run."""
    counters = total(made.counters)
    return {
        "tokens_per_s": round(counters.output_tokens / made.seconds, 2),
        "seconds": round(made.seconds, 2),
        "target_seconds": round(made.target_seconds, 2),
        "draft_seconds": round(made.draft_seconds, 2),
        "overhead": round(made.overhead, 4),
        "mean_accepted_length": mean_accepted_length(counters),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, default=QUICKSTART_DRAFT)
    parser.add_argument("--prompts", type=Path, help="ours by default")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(options.target, dtype=getattr(torch, options.dtype), device=options.device)
    draft = load_draft(options.draft, target=target)
    chat = load_chat(options.target)
    prompt_set = read_prompts(options.prompts) if options.prompts else shipped_prompts()
    prompts = [chat.prompt(prompt.turns[:1]) for prompt in prompt_set.select(limit=options.limit).prompts]
    batched = Settings(max_tokens=options.max_tokens, batch_size=len(prompts))
    with_draft, without = generate(target, prompts, batched, draft=draft), generate(target, prompts, batched)
    result = {
        "dtype": options.dtype,
        "device": options.device,
        "threads": options.threads,
        "prompts": len(prompts),
        "max_tokens": options.max_tokens,
        "torch": torch.__version__,
        "batch_1": one_by_one(target, draft, prompts, options.max_tokens),
        f"batch_{len(prompts)}": {"with_draft": summary(with_draft), "without": summary(without)},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
