"""What `eagle3pack convert` costs, beside `cp`, one hash pass and the ways that people convert today.

usage: python benchmarks/convert.py [--full] [--rounds N] [--folder DIR] [--reflink DIR]
                                    [--speculators PYTHON]

By default a draft of about 1 GB with the proportions of the published one; --full makes that one itself:
hidden 6144, 64 x 128 heads made 4 key/value heads, intermediate 18432, vocabulary 200064, own embedding and
head, 6.5 GB. --reflink names a folder on a file system that shares blocks (XFS, Btrfs); --speculators the
Python of an environment that has the speculators package.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measure import Run, interleave, median, ratio, run

HERE = Path(__file__).parent
PUBLISHED = {
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "head_dim": 128,
    "intermediate_size": 18432,
    "vocab_size": 200064,
}
SMALL = {
    "hidden_size": 2304,
    "num_attention_heads": 32,
    "head_dim": 96,
    "intermediate_size": 6912,
    "vocab_size": 75008,
}

NAIVE = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
source, out = map(Path, sys.argv[1:3])
heads, kv_heads = map(int, sys.argv[3:5])
tensors = load_file(source / "model.safetensors")
for name in ("midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight"):
    old = tensors[name]
    groups = old.reshape(kv_heads, heads // kv_heads, -1, old.shape[1])
    tensors[name] = groups.mean(1, dtype=torch.float32).reshape(-1, old.shape[1]).to(old.dtype)
out.mkdir()
save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
config = json.loads((source / "config.json").read_text())
config["num_key_value_heads"] = kv_heads
(out / "config.json").write_text(json.dumps(config, indent=2))
"""
HASH = """
import hashlib, sys
digest = hashlib.sha256()
with open(sys.argv[1], "rb", buffering=0) as file:
    buffer = memoryview(bytearray(1 << 20))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
"""
SPECULATORS = """
import sys
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
Eagle3Converter().convert(sys.argv[1], sys.argv[2], base_model=sys.argv[3], validate=False)
"""


@dataclass(frozen=True)
class Case:
    """A way to make OUT from the draft: the command, given OUT."""

    command: Callable[[Path], list[str]]
    reflink: bool = False


def main() -> None:
    """Measure and print a table."""
    arguments = parse_arguments()
    shape = PUBLISHED if arguments.full else SMALL
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="eagle3pack-bench-") as scratch:
        source = make_draft(Path(scratch) / "draft", shape)
        report(source, shape, compare(source, Path(scratch), arguments))
        if arguments.reflink:
            with tempfile.TemporaryDirectory(dir=arguments.reflink, prefix="eagle3pack-bench-") as shared:
                copy = Path(shutil.copytree(source, Path(shared) / "draft"))
                on_reflink(copy, Path(shared), arguments.rounds, shape)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to work; needs about three times the draft's size")
    parser.add_argument("--reflink")
    parser.add_argument("--speculators")
    return parser.parse_args()


def make_draft(folder: Path, shape: dict[str, int]) -> Path:
    """Write the synthetic draft, in a process of its own so that this one stays small."""
    subprocess.run(
        [sys.executable, str(HERE / "synthetic_draft.py"), str(folder), json.dumps(shape)], check=True
    )
    return folder


def convert_command(source: Path, out: Path, shape: dict[str, int], *more: str) -> list[str]:
    """The command that is measured: 16 query heads share one key/value head afterwards."""
    kv_heads = str(shape["num_attention_heads"] // 16)
    return [
        sys.executable,
        "-m",
        "eagle3pack",
        "convert",
        str(source),
        str(out),
        "--num-kv-heads",
        kv_heads,
        "-q",
        *more,
    ]


def compare(source: Path, scratch: Path, arguments: argparse.Namespace) -> dict[str, list[Run]]:
    """Everything beside everything, in one interleaved run."""
    shape = PUBLISHED if arguments.full else SMALL
    heads = shape["num_attention_heads"]
    weights = str(source / "model.safetensors")
    commands: dict[str, Callable[[Path], list[str]]] = {
        "cp": lambda out: ["cp", "-r", str(source), str(out)],
        "convert, not hashing": lambda out: convert_command(source, out, shape, "--no-hash"),
        "convert": lambda out: convert_command(source, out, shape),
        "hashlib sha256": lambda out: [sys.executable, "-c", HASH, weights],
        "load_file, mean, save_file": lambda out: [
            sys.executable,
            "-c",
            NAIVE,
            str(source),
            str(out),
            str(heads),
            str(heads // 16),
        ],
    }
    if arguments.speculators:
        commands["speculators' converter"] = lambda out: [
            arguments.speculators,
            "-c",
            SPECULATORS,
            str(source),
            str(out),
            str(source),
        ]
    out = scratch / "out"
    cases = {name: partial(measure, command, out) for name, command in commands.items()}
    return interleave(
        cases, rounds=arguments.rounds, before_each=lambda: shutil.rmtree(out, ignore_errors=True)
    )


def measure(command: Callable[[Path], list[str]], out: Path) -> Run:
    """Run one case until its output is durable."""
    return run(
        [
            "sh",
            "-c",
            'trap "" HUP; "$@" && { [ ! -e "$0" ] || find "$0" -type f -exec sync {} +; }',
            str(out),
            *command(out),
        ]
    )


def report(source: Path, shape: dict[str, int], runs: dict[str, list[Run]]) -> None:
    """Print the table."""
    size = (source / "model.safetensors").stat().st_size
    heads, rounds = shape["num_attention_heads"], len(runs["cp"])
    print(f"\nDraft of {size / 1e9:.2f} GB, {heads} -> {heads // 16} key/value heads")
    print(f"medians of {rounds} interleaved rounds, wall time until the output is durable")
    print(f"{'':30}{'wall':>12}{'CPU':>12}{'peak memory':>14}")
    base = median(runs["cp"])
    for name, found in runs.items():
        middle, against = median(found), ratio(found, runs["cp"])
        print(f"{name:30}{against:>7.2f} x cp{middle.cpu_s:>10.1f} s{middle.peak_bytes / 1e6:>11.0f} MB")
    print(f"cp: {base.wall_s:.2f} s")
    slower = [max(a.wall_s, b.wall_s) for a, b in zip(runs["cp"], runs["hashlib sha256"], strict=True)]
    against = sorted(c.wall_s / s for c, s in zip(runs["convert"], slower, strict=True))[len(slower) // 2]
    print(f"convert against the slower of cp and one hashlib pass: {against:.2f} x")


def on_reflink(source: Path, scratch: Path, rounds: int, shape: dict[str, int]) -> None:
    """The same where blocks can be shared."""
    out = scratch / "out"
    cases = {
        "cp --reflink=never": partial(
            measure, lambda out: ["cp", "-r", "--reflink=never", str(source), str(out)], out
        ),
        "convert, not hashing": partial(
            measure, lambda out: convert_command(source, out, shape, "--no-hash"), out
        ),
    }
    runs = interleave(cases, rounds=rounds, before_each=lambda: shutil.rmtree(out, ignore_errors=True))
    against = ratio(runs["convert, not hashing"], runs["cp --reflink=never"])
    print(f"\nSharing blocks: convert takes {against:.2f} x cp --reflink=never")


if __name__ == "__main__":
    main()
