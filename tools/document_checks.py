"""Write docs/checks.md and docs/faults.md from the code: python tools/document_checks.py [--check]

--check writes nothing and fails where a page is not what the code says.
"""

# ruff: noqa: E402, E501  the project is found by path, and a row of a Markdown table is one line

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from eagle3pack.verify.check import Check
from eagle3pack.verify.checks import FAMILIES, LEFT_OUT, all_checks
from tests.verify.faults import FAULTS, Fault

OUTCOMES = ROOT / "tests" / "verify" / "vllm_outcomes.json"
GENERATED = "<!-- Written by tools/document_checks.py; edit the checks, not this page. -->"

INTRODUCTION = """
# What `eagle3pack verify` checks

{generated}

{count} checks, by family. A failed check is an **error** where an engine stops, or worse, goes on in silence with
something else than was trained; a **warning** where quality, memory or another tool suffers, or where an engine is
left to a default; a **note** else. Some findings of a check are graver or milder than the check; each says so.

- An engine is named where a check concerns it alone. `--for` says whose rules count (default: vllm,sglang);
  those of other engines become notes.
- A producer's own form that one engine does not load (AngelSlim's architecture in SGLang) is a warning, and an
  error where you named that engine with `--for`.
- Checks marked *values* read the weights, all in one pass that also hashes them; `--quick` leaves them out.
- A check that cannot tell says why and is *not decided*; that is never a pass.
"""

DEFAULTS = """
## Where the readers' defaults differ

What is left out of a config is filled in by each reader in its own way. `eagle3pack convert --canonical` and
`verify --fix` write these keys for that reason.

| key | vLLM, native | vLLM, speculators | SGLang | TensorRT-LLM | llama.cpp | SpecForge |
|---|---|---|---|---|---|---|
| `norm_before_residual` | false | **true** | not known: false | not known: false | false | false |
| `norm_output` | false: feed the state before the norm | the same | the same | the same | not known | **true**, of another meaning |
| layer ids are read from | V1: top, then `eagle_config`; V2: top alone | top | `eagle_config` alone | its own options | nowhere | `eagle_config` or an option |
| layer ids count | after k layers | the same | the output of layer k | its own set | after k layers | the output of layer k |
| `draft_vocab_size` absent | `vocab_size` | 32000 | stops | `vocab_size`, warns | no EAGLE3 draft | `vocab_size` |
| `d2t` with a full vocabulary | stops | stops | harmless | ignored | harmless | always written |
| `tie_word_embeddings` true | ignored | ignored | the embedding is the head | ignored | ignored | set to false |
"""

FAULTS_INTRODUCTION = """
# One fault at a time: what vLLM makes of it, and what `verify` says

{generated}

Each row is a draft with one fault, made by `tests/verify/faults.py`. The middle column is what the loader of vLLM
{version} did when it was shown the files (CPU build, V1 runner); *loads* means that nothing was said. The rows
numbered without `#` or a letter are those of a measured table of faults; `#N` are public issues.
`verify` raises an error for whatever vLLM refuses, and for what it accepts in silence and wrongly.

| row | fault | vLLM | `verify`: errors | warnings among others |
|---|---|---|---|---|
"""


def checks_page() -> str:
    """docs/checks.md."""
    parts = [INTRODUCTION.format(generated=GENERATED, count=len(all_checks())).strip()]
    for family, checks in FAMILIES.items():
        parts.append(f"## {family.capitalize()}")
        parts += [entry(check) for check in checks]
    parts.append(DEFAULTS.strip())
    parts.append("## Left out, and why")
    parts.append("\n".join(f"- **{name}**: {reason}" for name, reason in LEFT_OUT.items()))
    return "\n\n".join(parts) + "\n"


def entry(check: Check) -> str:
    """One check."""
    marks = [check.severity, *(["values"] if check.streams else []), *check.engines]
    return f"### {check.id}: {check.title}\n\n*{', '.join(marks)}*. {check.reason}\n\nSource: {check.source}"


def faults_page() -> str:
    """docs/faults.md."""
    recorded = json.loads(OUTCOMES.read_text("utf-8"))
    head = FAULTS_INTRODUCTION.format(generated=GENERATED, version=recorded["vllm"]).lstrip()
    return head + "".join(row(fault, recorded["outcomes"]) for fault in FAULTS)


def row(fault: Fault, outcomes: dict[str, dict[str, str]]) -> str:
    """One fault."""
    found = outcomes.get(f"{fault.row} {fault.name}", {"outcome": "not shown", "message": ""})
    message = found["message"].replace("|", "\\|").replace("`", "'")
    vllm = found["outcome"] + (f": `{message}`" if message else "")
    errors, warnings = ", ".join(sorted(fault.errors)), ", ".join(sorted(fault.warnings))
    return f"| {fault.row} | {fault.name} | {vllm} | {errors or 'none'} | {warnings} |\n"


def main() -> None:
    """Write or compare both pages."""
    pages = {ROOT / "docs" / "checks.md": checks_page(), ROOT / "docs" / "faults.md": faults_page()}
    for path, text in pages.items():
        if "--check" not in sys.argv:
            path.write_text(text, "utf-8")
        elif not path.exists() or path.read_text("utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is stale: run python tools/document_checks.py")


if __name__ == "__main__":
    main()
