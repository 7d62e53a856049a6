"""Convert a real EAGLE3 draft from 16 key/value heads to 4, as `make quickstart` does.

The two steps are shell commands that you could type; each is printed before it runs.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DRAFT = Path("examples/quickstart/draft")
OUT = Path("out/quickstart")


def run(*command: str) -> None:
    """Print a command and run it with this environment's eagle3pack; stop at the first failure."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    result = subprocess.run([sys.executable, "-m", *command], check=False)
    if result.returncode:
        sys.exit(result.returncode)


def main() -> None:
    """The whole quickstart."""
    os.chdir(ROOT)
    OUT.mkdir(parents=True, exist_ok=True)
    gqa = str(OUT / "draft-gqa4-mean")
    run("eagle3pack", "convert", str(DRAFT), gqa, "--num-kv-heads", "4", "--overwrite")
    print(f"\nThe converted draft is in {gqa}, the record of what was done in {gqa}/eagle3pack.json.")


if __name__ == "__main__":
    main()
