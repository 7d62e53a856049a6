"""What publishing a 6.5 GB draft to two hubs costs: reads, memory, and a run in which nothing changed.

    python benchmarks/publish_two_hubs.py [--gigabytes 6.5] [--xet] [--random]

Both hubs are the protocol servers of the tests, on this machine; they hash what they get and forget it. The
weights are a sparse file, so that no disk is needed and reading costs what reading from memory costs;
`--random` writes real ones, which Xet cannot deduplicate.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from eagle3pack.checkpoint.digest import draft_digest, draft_files, sha256_file  # noqa: E402
from tests.publish import inputs  # noqa: E402
from tests.publish.hubs import huggingface, modelscope  # noqa: E402
from tests.tiny import native_config  # noqa: E402

COMMAND = """
import json
from pathlib import Path
try:
    from eagle3pack.cli import main
    main()
finally:
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    # not ru_maxrss: across exec that keeps the parent's, which has torch
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    Path("usage.json").write_text(json.dumps({"read": int(io["rchar"]), "peak": peak}))
"""


def write_draft(folder: Path, size: int, *, random: bool) -> None:
    """A config and one valid safetensors file: of random bytes, or of zeros that take no disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(native_config()))
    rows = size // 2
    header = {"embed_tokens.weight": {"dtype": "BF16", "shape": [rows], "data_offsets": [0, 2 * rows]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, 2 * rows if random else 0, 1 << 24):
            file.write(os.urandom(min(1 << 24, 2 * rows - start)))
        file.truncate(8 + len(text) + 2 * rows)


def report_on(folder: Path) -> dict[str, Any]:
    """A report whose digest is that of the folder, hashed without holding a file in memory."""
    files = [(path.name, path.stat().st_size, sha256_file(path)) for path in draft_files(folder)]
    report = inputs.report(ROOT / "examples" / "minimax-m3" / "draft")
    report["draft"]["digest"] = draft_digest(files)
    return report


def publish(work: Path, env: dict[str, str]) -> dict[str, Any]:
    """Run the command and say what it used."""
    argv = [sys.executable, "-c", COMMAND, "publish", "draft", "--report", "report.json", "--yes"]
    argv += ["--to", "hf:org/big", "--to", "ms:org/big"]
    start = time.monotonic()
    subprocess.run(argv, cwd=work, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    usage: dict[str, Any] = json.loads((work / "usage.json").read_text())
    return usage | {"seconds": time.monotonic() - start}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=6.5)
    parser.add_argument("--xet", action="store_true", help="upload to Hugging Face through Xet")
    parser.add_argument(
        "--random", action="store_true", help="random weights, which take disk and chunk apart"
    )
    asked = parser.parse_args()
    size = int(asked.gigabytes * 1e9)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        write_draft(work / "draft", size, random=asked.random)
        inputs.write_report(work / "report.json", report_on(work / "draft"))
        (work / "publish.yaml").write_text(inputs.SETTINGS.replace("chart: false\n", ""))
        with (
            huggingface.HuggingFace(work / "hf", part_bytes=None) as hf,
            modelscope.ModelScope(work / "ms") as ms,
        ):
            for hub in (hf, ms):
                hub.blobs.forget_above = 1_000_000
            env = os.environ | {
                "PYTHONPATH": str(ROOT),
                "HF_ENDPOINT": hf.endpoint,
                "HF_TOKEN": huggingface.TOKEN,
                "HF_HOME": str(work / "home"),
                "HF_HUB_DISABLE_XET": "0" if asked.xet else "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "MODELSCOPE_ENDPOINT": ms.endpoint,
                "MODELSCOPE_API_TOKEN": modelscope.TOKEN,
                "MODELSCOPE_HOME": str(work / "home"),
            }
            first = publish(work, env)
            again = publish(work, env)
            hashing = hash_seconds(work / "draft" / "model.safetensors")
    print(f"published {asked.gigabytes} GB to two hubs in {first['seconds']:.1f} s")
    print(f"  read {first['read'] / size:.2f} times, peak memory {first['peak'] / 1e6:.0f} MB")
    print(f"unchanged: {again['seconds']:.1f} s, of which hashing {hashing:.1f} s")
    print(f"  read {again['read'] / size:.2f} times, peak memory {again['peak'] / 1e6:.0f} MB")


def hash_seconds(path: Path) -> float:
    """What one pass of sha256 takes here."""
    start = time.monotonic()
    sha256_file(path)
    return time.monotonic() - start


if __name__ == "__main__":
    main()
