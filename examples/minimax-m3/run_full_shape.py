"""The published release at its full shape, with synthetic weights, as far as a CPU can take it.

    python examples/minimax-m3/run_full_shape.py FOLDER        (needs 13 GB there)

Makes a 6.5 GB MHA draft of the published shape, converts it from 64 to 4 key/value heads by both methods'
data-free forms, and holds the result against the bundled shape of the target. Every command is printed.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SHAPE = {
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "head_dim": 128,
    "intermediate_size": 18432,
    "vocab_size": 200064,
}


def run(*arguments: str, may_fail: bool = False) -> None:
    """Print a command, run it with this environment's Python, and say how long it took and what it held."""
    print(f"\n$ {shlex.join(arguments).removeprefix('-m ')}", flush=True)
    started = time.monotonic()
    command = ["/usr/bin/env", "time", "-f", "peak memory %M kB", sys.executable, *arguments]
    if shutil.which("time") is None:
        command = command[4:]
    result = subprocess.run(command, check=False)
    print(f"took {time.monotonic() - started:.0f} s")
    if result.returncode and not may_fail:
        sys.exit(result.returncode)


def main() -> None:
    """Everything that needs no GPU."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    mha, gqa = str(folder / "mha"), str(folder / "gqa")
    run(str(ROOT / "benchmarks" / "synthetic_draft.py"), mha, json.dumps(SHAPE))
    target = ("--target", "MiniMaxAI/MiniMax-M3")
    for method in ("mean", "als"):
        run("-m", "eagle3pack", "convert", mha, gqa, *target, "--method", method, "--overwrite")
    # Random weights are no trained draft: some checks of values may say so. The shape is what counts here.
    run("-m", "eagle3pack", "verify", gqa, *target, "--tensor-parallel-size", "4", may_fail=True)
    shutil.rmtree(mha)
    shutil.rmtree(gqa)


if __name__ == "__main__":
    main()
