"""Reports, publish.yaml and conversion records for tests, valid unless a test changes them."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

from eagle3pack.checkpoint.digest import draft_digest, draft_files

SETTINGS = """\
name: tiny-eagle3
license: mit
target:
  huggingface: org/target
  modelscope: org/target-ms
tags: [tiny]
summary: A tiny draft for tests.
chart: false
training:
  text: Trained with care on {{ publish.yaml#/training/facts/samples }} samples.
  facts: {samples: 1200}
"""
RUN: dict[str, Any] = {
    "origin": "measured",
    "source_url": None,
    "command": "eagle3pack verify draft --target hf:org/target --engine vllm",
    "draft": {"source": "draft", "digest": None},
    "dataset": {
        "name": "MT-Bench",
        "sha256": "0" * 64,
        "n_prompts": 64,
        "n_requests": 128,
        "categories": ["writing"],
    },
    "target": {
        "id": "hf:org/target",
        "revision": "abc123",
        "config_sha256": None,
        "dtype": "bfloat16",
        "quantization": None,
    },
    "engine": {
        "name": "vllm",
        "version": "0.32.0",
        "runner": "V1",
        "backend": "FLASH_ATTN",
        "device": "H200",
    },
    "tensor_parallel_size": 4,
    "tp_source": "measured",
    "max_concurrency": 16,
    "sampling": {"temperature": 0.0, "top_p": None, "max_tokens": 256},
    "enforce_eager": False,
    "num_speculative_tokens": 3,
    "drafts": 1000,
    "draft_tokens": 3000,
    "accepted_tokens": 1669,
    "accepted_per_position": [745, 537, 387],
    "output_tokens": 2700,
    "wall_s": 12.5,
    "mean_accepted_length": 2.669,
    "draft_accept_rate": 1669 / 3000,
    "per_position_accept_rate": [0.745, 0.537, 0.387],
    "baseline": None,
    "against": None,
}


def digest_of(folder: Path) -> str:
    """The digest of the draft in a folder."""
    return draft_digest(
        (path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in draft_files(folder)
    )


def run(**changes: Any) -> dict[str, Any]:
    """A measured run."""
    return copy.deepcopy(RUN) | changes


def baseline(**changes: Any) -> dict[str, Any]:
    """The same prompts without a draft."""
    nothing = dict.fromkeys(
        [
            "drafts",
            "draft_tokens",
            "accepted_tokens",
            "accepted_per_position",
            "mean_accepted_length",
            "draft_accept_rate",
            "per_position_accept_rate",
            "draft",
        ]
    )
    return run(**nothing) | {"num_speculative_tokens": 0, "wall_s": 25.0} | changes


def quoted(**changes: Any) -> dict[str, Any]:
    """A run with the published figures of MiniMax-M3-EAGLE3-GQA."""
    counters = [
        "drafts",
        "draft_tokens",
        "accepted_tokens",
        "accepted_per_position",
        "output_tokens",
        "wall_s",
    ]
    figures = {
        "origin": "quoted",
        "source_url": "https://example.org/card",
        "mean_accepted_length": 2.668,
        "draft_accept_rate": 0.5562,
        "per_position_accept_rate": [0.745, 0.537, 0.387],
    }
    return run(**dict.fromkeys(counters)) | figures | changes


def failed_check(severity: str = "warning", **changes: Any) -> dict[str, Any]:
    """A check that failed."""
    finding = {
        "severity": severity,
        "message": "8 heads do not divide by 3",
        "evidence": {},
        "fix": "Convert it.",
        "mendable": False,
        "producer_bug": None,
    }
    return {
        "id": "A01",
        "family": "attention",
        "title": "Heads divide",
        "severity": severity,
        "engines": [],
        "status": "failed",
        "message": "8 heads do not divide by 3",
        "findings": [finding],
    } | changes


def report(folder: Path, runs: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """A report on the draft in a folder."""
    document: dict[str, Any] = {
        "schema": "eagle3pack/report/1",
        "tool": {"name": "eagle3pack", "version": "0.1.0"},
        "created": "2026-01-02T03:04:05Z",
        "complete": True,
        "passed": True,
        "strict": False,
        "draft": {
            "source": "draft",
            "revision": None,
            "digest": digest_of(folder),
            "files": [],
            "architecture": "LlamaForCausalLMEagle3",
            "num_parameters": None,
        },
        "target": {
            "id": "hf:org/target",
            "revision": "abc123",
            "config_sha256": None,
            "bundled_from": None,
            "architecture": "LlamaForCausalLM",
        },
        "engines": ["vllm"],
        "tensor_parallel_size": 4,
        "summary": dict.fromkeys(
            ["errors", "warnings", "notes", "passed", "not_decided", "not_applicable", "not_run"], 0
        ),
        "checks": [],
        "serving": None,
        "smoke": {"status": "passed", "reason": "", "runs": [run()] if runs is None else runs},
    }
    return document | changes


def write_report(path: Path, document: dict[str, Any]) -> Path:
    """Write a report and return its path."""
    path.write_text(json.dumps(document, indent=2))
    return path
