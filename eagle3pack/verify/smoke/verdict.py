"""Whether a smoke test has passed: pure functions from what was measured to what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3pack.verify.smoke.options import SmokeOptions

_TELLING_DRAFTS = 50  # a draft that works has a token accepted long before

# In the order in which they turned out to be the cause in public issues.
LIKELY_CAUSES = (
    "auxiliary layers: other ids, or counted in another way, than in training (checks A01 to A05)",
    "d2t: missing, absolute instead of offsets, or not that of lm_head's rows (V01 to V08, T16)",
    "fc or the norms around it: never loaded, or fed in another order (T01, T08, C20, C22, C23)",
    "RoPE: another theta or scaling than in training (R01 to R05)",
    "another target than the draft was trained for, or another tokenizer (C18, K11, V11)",
)


def judge(run: Mapping[str, Any], options: SmokeOptions) -> list[str]:
    """What fails the test, one sentence each; nothing where it has passed.

    Args:
        run: a smoke_run of report.json.
        options: the limits that the user set.
    """
    failures = [*_acceptance(run, options), *_agreement(run, options), *_retention(run, options)]
    for probe in run.get("probes", ()):
        if probe["status"] == "failed":
            failures.append(f"probe {probe['name']}: {probe['message']}")
    return failures


def _acceptance(run: Mapping[str, Any], options: SmokeOptions) -> list[str]:
    length = run["mean_accepted_length"]
    if length is None:
        return ["nothing was drafted: every answer ended before a draft, or the engine does not use it"]
    if not run["accepted_tokens"] and run["drafts"] < _TELLING_DRAFTS:
        return [
            f"no draft token was accepted, but only {run['drafts']} drafts were made: too few to tell. "
            "Ask more: more prompts (--limit) or longer answers (--max-tokens)"
        ]
    if not run["accepted_tokens"]:
        causes = "".join(f"\n  {number}. {cause}" for number, cause in enumerate(LIKELY_CAUSES, 1))
        return [
            f"no draft token was accepted in {run['drafts']} drafts (mean accepted length 1.0). "
            f"Likely causes, the most frequent first:{causes}"
        ]
    if options.min_acceptance_length is not None and length < options.min_acceptance_length:
        return [f"mean accepted length {length:.3f} is below {options.min_acceptance_length:g}"]
    return []


def _agreement(run: Mapping[str, Any], options: SmokeOptions) -> list[str]:
    agreement = run.get("agreement")
    if options.min_agreement is None or agreement is None:
        return []
    share = agreement["share"]
    if share is not None and share >= options.min_agreement:
        return []
    return [
        f"{agreement['identical']} of {agreement['compared']} greedy answers are those without a draft, "
        f"below {options.min_agreement:.0%}"
    ]


def _retention(run: Mapping[str, Any], options: SmokeOptions) -> list[str]:
    if run.get("against") is None:
        return []
    retention = run["retention"]
    if retention is None:
        return ["retention is undefined: the other draft had no token accepted"]
    if options.min_retention is not None and retention < options.min_retention:
        return [f"retention {retention:.3f} is below {options.min_retention:g}"]
    return []
