"""What `eagle3pack verify` costs: --quick beside importing Click, the whole beside one pass of sha256.

usage: python benchmarks/verify.py [--full] [--rounds N] [--folder DIR]

By default a draft of about 1 GB with the proportions of the published one; --full makes that one itself,
6.5 GB. Goals: --quick at most 1.5 times the CPU of `import click` plus 30 ms, and 40 MB, whatever the size
of the draft; the whole at most 2.0 times the CPU of one sha256 pass, and 128 MB.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from convert import HASH, PUBLISHED, SMALL, make_draft
from measure import Run, interleave, run


def main() -> None:
    """Measure, print a table, and fail where a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to work; needs the draft's size")
    arguments = parser.parse_args()
    shape = PUBLISHED if arguments.full else SMALL
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="eagle3pack-bench-") as scratch:
        source = make_draft(Path(scratch) / "draft", shape)
        target = Path(scratch) / "config.json"
        target.write_text(json.dumps(target_config(shape)))
        runs = interleave(cases(source, target), rounds=arguments.rounds)
    report(runs)


def target_config(shape: dict[str, int]) -> dict[str, object]:
    """A target that the synthetic draft fits, of its own layers and positions."""
    heads = {"num_key_value_heads": shape["num_attention_heads"] // 16, "num_hidden_layers": 60}
    rest = {"rope_theta": 5000000.0, "max_position_embeddings": 524288}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape, **heads, **rest}


def cases(source: Path, target: Path) -> dict[str, Callable[[], Run]]:
    """What is run in turn."""
    program = str(Path(sys.executable).with_name("eagle3pack"))  # as users run it; -m costs runpy too
    verify = [program, "verify", str(source), "--target", str(target)]
    commands = {
        "import click": [sys.executable, "-c", "import click"],
        "verify --quick": [*verify, "--quick"],
        "hashlib sha256": [sys.executable, "-c", HASH, str(source / "model.safetensors")],
        "verify": [*verify, "--engine", "none"],
    }
    return {name: partial(run, command) for name, command in commands.items()}


def report(runs: dict[str, list[Run]]) -> None:
    """The table, with the least CPU time of each case: noise only adds."""
    cpu = {name: min(one.cpu_s for one in of) for name, of in runs.items()}
    peak = {name: max(one.peak_bytes for one in of) / 1e6 for name, of in runs.items()}
    for name in runs:
        print(f"{name:16}  {cpu[name]:8.3f} s CPU  {peak[name]:7.1f} MB")
    quick_limit = 1.5 * cpu["import click"] + 0.030
    ratio = cpu["verify"] / cpu["hashlib sha256"]
    print(f"--quick: {cpu['verify --quick']:.3f} s of {quick_limit:.3f} s allowed")
    print(f"whole: {ratio:.2f} times one sha256 pass of 2.0 allowed")
    if (
        cpu["verify --quick"] > quick_limit
        or peak["verify --quick"] > 40
        or ratio > 2
        or peak["verify"] > 128
    ):
        sys.exit("a goal is missed")


if __name__ == "__main__":
    main()
