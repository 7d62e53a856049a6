"""From a real MHA draft to GQA drafts that are measured, as `make quickstart` does.

Every step is a shell command that you could type; each is printed before it runs.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DRAFT = "examples/quickstart/draft"
TARGET = ".cache/smollm2-target"
OUT = "out/quickstart"
REPOSITORY = "example/smollm2-eagle3-gqa"  # nothing is sent: the publishing is a dry run


def run(*command: str) -> None:
    """Print a command and run it with this environment's Python; stop at the first failure."""
    shown = shlex.join(command).removeprefix("-m ")
    print(f"\n$ {'' if shown.startswith('eagle3pack') else 'python '}{shown}", flush=True)
    result = subprocess.run([sys.executable, *command], check=False)
    if result.returncode:
        sys.exit(result.returncode)


def main() -> None:
    """The whole quickstart."""
    os.chdir(ROOT)
    run("tools/make_smollm2_target.py", TARGET)
    run("-m", "eagle3pack", "verify", DRAFT, "--target", TARGET, "--engine", "none")
    for method in ("mean", "als"):
        gqa = f"{OUT}/draft-gqa4-{method}"
        run(
            *("-m", "eagle3pack", "convert", DRAFT, gqa),
            *("--num-kv-heads", "4", "--method", method, "--overwrite"),
        )
        run(
            *("-m", "eagle3pack", "verify", gqa, "--target", TARGET, "--against", DRAFT),
            *("--limit", "8", "--max-tokens", "64", "--no-probes", "--report", f"{OUT}/report-{method}.json"),
        )
        run(
            *("-m", "eagle3pack", "publish", gqa, "--report", f"{OUT}/report-{method}.json"),
            *(
                "--config",
                "examples/quickstart/publish.yaml",
                "--to",
                f"hf:{REPOSITORY}",
                "--to",
                f"ms:{REPOSITORY}",
            ),
            *("--dry-run", "--offline", "--render-to", f"{OUT}/cards-{method}"),
        )
    print(f"\nThe converted drafts, their records (eagle3pack.json), reports and cards are in {OUT}.")


if __name__ == "__main__":
    main()
