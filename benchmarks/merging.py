"""What a calibrated merge costs, phase by phase: seconds, CPU seconds and the largest resident set.

usage: python benchmarks/merging.py FOLDER [--full] [--tokens N] [--length N] [--refit NAME] [--grouping NAME]

Writes a draft with random weights and a calibration of random activations into FOLDER, unless they are there,
and merges its heads as `convert --method als --calibration FILE --dry-run` does: everything is computed,
nothing written. --full takes the published shape, hidden 6144 and 64 heads of 128, made 4 key/value heads.
Random heads have nothing in common, so that costs alone mean something here, not errors.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from convert import PUBLISHED, SMALL
from synthetic_draft import write_synthetic_draft

from eagle3pack.checkpoint.files import open_checkpoint
from eagle3pack.convert import command
from eagle3pack.convert.merging import calibrated, merge, ridge
from eagle3pack.convert.merging.calibration import (
    SCHEMA,
    Calibration,
    Stretch,
    attention_digest,
    write_calibration,
)
from eagle3pack.convert.merging.compute import Merging
from eagle3pack.convert.merging.replay import Replay

K = 3
MEAN_ACCEPTED = 2  # tokens a round keeps, so that steps 1 and 2 are as common as in a real recording
PHASES = (
    (command, "find_calibration"),
    (calibrated, "merge"),
    (merge, "refit_output"),
    (ridge, "second_moments"),
    (calibrated, "attention_outputs"),
    (calibrated, "output_error"),
    (calibrated, "compare"),
    (Merging, "_around"),
    (Replay, "counters"),
)


class Table:
    """Rows of what wrapped functions cost, in the order in which they end."""

    def __init__(self) -> None:
        print(f"{'':28} {'wall s':>8} {'CPU s':>8} {'peak GB':>8}")

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        """Measure a block."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        took = time.perf_counter() - wall, time.process_time() - cpu
        print(f"{name:28} {took[0]:8.1f} {took[1]:8.1f} {peak_bytes() / 1e9:8.2f}", flush=True)

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, measured."""

        @wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.row(name):
                return function(*args, **kwargs)

        return measured


def peak_bytes() -> int:
    """The largest resident set so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def rounds(length: int) -> tuple[Tensor, Tensor]:
    """Positions and steps of one recorded text, a quarter of it prompt, in the order of the passes."""
    positions, steps = list(range(length // 4)), [0] * (length // 4)
    end = length // 4
    while len(positions) < length:
        positions += [end + i for i in range(K - 1)]
        steps += range(1, K)
        positions += range(end, end + MEAN_ACCEPTED)
        steps += [0] * MEAN_ACCEPTED
        end += MEAN_ACCEPTED
    cut = torch.tensor([positions[:length], steps[:length]], dtype=torch.int32)
    return cut[0], cut[1]


def synthetic_calibration(draft: Path, shape: dict[str, int], tokens: int, length: int) -> Calibration:
    """Tokens by Zipf's law, hidden states that drift; every tenth text held out."""
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(shape["vocab_size"], width, generator=generator, dtype=torch.bfloat16)
    zipf = 1 / (1 + torch.arange(shape["vocab_size"], dtype=torch.float64))
    stretches = []
    for index in range(-(-tokens // length)):
        positions, steps = rounds(min(length, tokens - index * length))
        ids = torch.multinomial(zipf, len(positions), replacement=True, generator=generator).int()
        hidden = torch.randn(len(positions), width, generator=generator)
        for t in range(1, len(hidden)):
            hidden[t] = 0.7 * hidden[t - 1] + 0.7 * hidden[t]
        answer = (steps == 0) & (positions >= length // 4)
        held_out = index % 10 == 0
        stretches.append(Stretch(table[ids], hidden.bfloat16(), positions, steps, held_out, ids, answer))
    x = torch.cat([torch.cat([s.embeds, s.hidden], 1) for s in stretches[:8]]).float()
    held_out = sum(len(s.positions) for s in stretches if s.held_out)
    tensors = open_checkpoint(draft).tensors
    document = {
        "schema": SCHEMA,
        "created": "2000-01-01T00:00:00Z",
        "tool": {"name": "eagle3pack", "version": "0"},
        "libraries": {},
        "target": {"id": "synthetic"},
        "prompts": [{"name": "synthetic", "sha256": "0" * 64, "num_prompts": len(stretches)}],
        "generation": {"num_speculative_tokens": K, "max_tokens": length, "dtype": "bfloat16"},
        "draft": {
            "id": "synthetic",
            "attention_sha256": attention_digest(
                {name.replace("midlayer.", "layers.0."): entry for name, entry in tensors.items()}
            ),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": shape["head_dim"],
            "hidden_size": width,
        },
        "tokens": {
            "moments": tokens - held_out,
            "activations": tokens - held_out,
            "held_out": held_out,
            "distances": 1,
            "by_step": [tokens],
        },
    }
    mass = (1 / (1 + torch.arange(length, dtype=torch.float64))).repeat(heads, 1)
    mass = mass / mass.sum(1, keepdim=True)
    return Calibration(document, x.T @ x / len(x), x.mean(0), mass, tuple(stretches))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=1024, help="activations of a text")
    parser.add_argument("--refit")
    parser.add_argument("--grouping", default="contiguous")
    arguments = parser.parse_args()
    shape = PUBLISHED if arguments.full else SMALL
    draft = arguments.folder / ("full" if arguments.full else "small")
    file = arguments.folder / f"{draft.name}-{arguments.tokens}-{arguments.length}.safetensors"
    if not draft.exists():
        write_synthetic_draft(draft, shape)
    if not file.exists():
        write_calibration(synthetic_calibration(draft, shape, arguments.tokens, arguments.length), file)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    table = Table()
    for where, name in PHASES:
        setattr(where, name, table.wrapped(name.strip("_"), getattr(where, name)))
    options = command.ConvertOptions(
        num_kv_heads=4,
        method="als",
        calibration=(file,),
        refit_output=arguments.refit,
        grouping=arguments.grouping,
        dry_run=True,
    )
    with table.row("all"):
        command.run_convert(
            str(draft),
            str(arguments.folder / "none"),
            options,
            say=lambda text: print(f"  {text}", file=sys.stderr),
            progress=lambda *_, **__: nullcontext(lambda count: None),
        )


if __name__ == "__main__":
    main()
