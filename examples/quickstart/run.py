"""From a real MHA draft to GQA drafts that are measured, as `make quickstart` does.

Every step is a shell command that you could type; each is printed before it runs.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
METHODS = ("mean", "als")
PREPARE = """\
python tools/make_smollm2_target.py .cache/smollm2-target
eagle3pack verify examples/quickstart/draft --target .cache/smollm2-target --engine none
"""
# Nothing is sent: the publishing is a dry run.
FOR_EACH_METHOD = """\
eagle3pack convert examples/quickstart/draft out/quickstart/draft-gqa4-{method} --num-kv-heads 4 \
--method {method} --overwrite
eagle3pack verify out/quickstart/draft-gqa4-{method} --target .cache/smollm2-target \
--against examples/quickstart/draft --limit 8 --max-tokens 64 --no-probes \
--report out/quickstart/report-{method}.json
eagle3pack publish out/quickstart/draft-gqa4-{method} --report out/quickstart/report-{method}.json \
--config examples/quickstart/publish.yaml --to hf:example/smollm2-eagle3-gqa \
--to ms:example/smollm2-eagle3-gqa --dry-run --offline --render-to out/quickstart/cards-{method}
"""


def commands() -> list[str]:
    """Every step, in order."""
    return [*PREPARE.splitlines(), *(step for m in METHODS for step in _steps(m))]


def _steps(method: str) -> list[str]:
    return FOR_EACH_METHOD.format(method=method).splitlines()


def run(command: str) -> None:
    """Print a command and run it with this environment's Python; stop at the first failure."""
    print(f"\n$ {command}", flush=True)
    program, *arguments = shlex.split(command)
    start = [sys.executable] if program == "python" else [sys.executable, "-m", program]
    if code := subprocess.run([*start, *arguments], check=False).returncode:
        sys.exit(code)


def summary(out: Path) -> str:
    """What the reports say of the methods."""
    lines = ["Of the accepted draft tokens, a converted draft keeps, before any retraining:"]
    for method in METHODS:
        report = json.loads((out / f"report-{method}.json").read_text("utf-8"))
        lines.append(f"  {method:6}{report['smoke']['runs'][0]['retention']:.3f}")
    return "\n".join(
        [*lines, f"The drafts, their records (eagle3pack.json), reports and cards are in {out}."]
    )


def main() -> None:
    """The whole quickstart."""
    os.chdir(ROOT)
    for command in commands():
        run(command)
    print(f"\n{summary(Path('out/quickstart'))}")


if __name__ == "__main__":
    main()
