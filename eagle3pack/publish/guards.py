"""What must never be sent: secrets, pointers in place of weights, links, two names for one file.

Each guard answers a public failure; the tests name them. Nothing here changes a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from eagle3pack.errors import InputError
from eagle3pack.publish.hub import HUB_NAMES, HubKind, PublishedFile

POINTER_START = b"version https://git-lfs.github.com/spec/"
# What the hubs' documentation allows for one file.
MAX_FILE_BYTES: Mapping[HubKind, int] = {"hf": 200_000_000_000, "ms": 50_000_000_000}
# Files that a draft needs or that explain it. Anything else in the folder stays there.
ALLOWED_NAMES = re.compile(
    r"config\.json|generation_config\.json|eagle3pack\.json"
    r"|[\w.-]+\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer\.json|tokenizer_config\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.json|merges\.txt|chat_template\.(?:jinja|json)"
    r"|(?i:licen[cs]e|notice)(?:[-.][\w.-]+)?",
    re.ASCII,
)
SECRETS: Mapping[str, re.Pattern[bytes]] = {
    "a Hugging Face token": re.compile(rb"\bhf_[A-Za-z0-9]{30,}"),
    "a ModelScope token": re.compile(rb"\bms-[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"),
    "an AWS key": re.compile(rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a GitHub token": re.compile(rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40,})"),
    "a GitLab token": re.compile(rb"\bglpat-[A-Za-z0-9_-]{20}"),
    "an OpenAI key": re.compile(rb"\bsk-[A-Za-z0-9_-]{32,}"),
    "a Slack token": re.compile(rb"\bxox[abprs]-[A-Za-z0-9-]{20,}"),
    "a Google key": re.compile(rb"\bAIza[0-9A-Za-z_-]{35}"),
    "a Weights & Biases key": re.compile(rb"(?i:wandb)[^\n]{0,40}?\b[0-9a-f]{40}\b"),
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}


def require_plain_file(path: Path) -> None:
    """Refuse what is no regular file: its content would come from somewhere else, or from nowhere.

    Raises:
        InputError: a symbolic link, a folder, a device.
    """
    if path.is_symlink():
        raise InputError(
            "is a symbolic link; what it points to would be published",
            where=str(path),
            hint="Copy the folder with its content: cp -rL FOLDER COPY.",
        )
    if not path.is_file():
        raise InputError("is no regular file", where=str(path))


def require_content(path: Path, size: int, start: bytes) -> None:
    """Refuse a file that stands for other content, or has none.

    Args:
        path: the file.
        size: its bytes.
        start: its first bytes.

    Raises:
        InputError: a git-lfs pointer, or an empty file of weights.
    """
    if start.startswith(POINTER_START):
        raise InputError(
            "is a git-lfs pointer, not the file itself", where=str(path), hint="Fetch it: git lfs pull."
        )
    if size == 0 and path.suffix == ".safetensors":
        raise InputError("is empty", where=str(path), hint="Copy or download it again.")


def require_no_secrets(content: bytes, *, where: str) -> None:
    """Refuse text that holds the shape of a credential; the message does not repeat it.

    Raises:
        InputError: it does.
    """
    for kind, pattern in SECRETS.items():
        if match := pattern.search(content):
            line = content.count(b"\n", 0, match.start()) + 1
            raise InputError(
                f"line {line} holds what looks like {kind}",
                where=where,
                hint="Take it out, and revoke it if it was ever shared.",
            )


def require_distinct_names(paths: Iterable[str]) -> None:
    """Refuse two names that differ in case alone: on many disks only one of them survives a download.

    Raises:
        InputError: there are two.
    """
    seen: dict[str, str] = {}
    for path in paths:
        other = seen.setdefault(path.casefold(), path)
        if other != path:
            raise InputError(f"{other} and {path} differ only in upper and lower case", hint="Rename one.")


def require_sizes(files: Sequence[PublishedFile], hubs: Iterable[HubKind]) -> None:
    """Refuse what a hub would not take.

    Raises:
        InputError: a file is too large for one of the hubs.
    """
    for kind in hubs:
        for file in files:
            if file.size > MAX_FILE_BYTES[kind]:
                raise InputError(
                    f"has {file.size} bytes; {HUB_NAMES[kind]} takes {MAX_FILE_BYTES[kind]}",
                    where=str(file.local),
                    hint="Write it in shards: eagle3pack convert --shard-size 5GB.",
                )
