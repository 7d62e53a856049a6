"""The guards: what must never leave the folder. Each answers a public failure."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from eagle3pack.errors import ConflictError, InputError
from eagle3pack.publish.folder import read_folder
from eagle3pack.publish.guards import require_sizes
from eagle3pack.publish.hub import PublishedFile
from tests.cli import Cli
from tests.publish.inputs import digest_of
from tests.tiny import write_draft


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "draft")


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        read_folder(folder)
    for word in words:
        assert word in str(caught.value)


def test_the_digest_is_that_of_the_draft(folder: Path) -> None:
    assert read_folder(folder).digest == digest_of(folder)


def test_only_allowed_files_are_taken(folder: Path) -> None:
    """huggingface_hub#2755: wrong things uploaded."""
    for name in (".env", "optimizer.pt", "rng_state.pth", "trainer_state.json", "README.md", "wandb.log"):
        (folder / name).write_text("x")
    (folder / ".cache").mkdir()
    (folder / "checkpoints").mkdir()
    draft = read_folder(folder)
    assert [file.path for file in draft.files] == ["config.json", "model.safetensors"]
    assert {".env", ".cache", "checkpoints", "optimizer.pt", "README.md"} <= set(draft.left_out)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "LICENSE"])
def test_symbolic_links_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    """huggingface_hub#2883: a link is followed, or silently dropped."""
    elsewhere = tmp_path / "elsewhere"
    (folder / name).touch()
    shutil.move(folder / name, elsewhere)
    (folder / name).symlink_to(elsewhere)
    refused(folder, name, "symbolic link")


def test_a_dangling_link_is_refused(folder: Path) -> None:
    (folder / "LICENSE").symlink_to(folder / "nowhere")
    refused(folder, "LICENSE", "symbolic link")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_lfs_pointers_are_refused(folder: Path, name: str) -> None:
    """transformers#13401: a pointer loaded as weights."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n"
    (folder / name).write_text(pointer)
    refused(folder, name, "git-lfs pointer")


def test_empty_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, "model.safetensors", "empty")


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refused(folder, "pickles")


def test_a_draft_of_pickles_is_told_the_command_that_rewrites_it(folder: Path, cli: Cli) -> None:
    import shlex

    import torch
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError) as caught:
        read_folder(folder)
    command = shlex.split(caught.value.hint.partition(": ")[2])
    assert command[0] == "eagle3pack" and cli(*command[1:]).code == 0
    assert read_folder(folder.with_name("draft-safetensors")).digest is not None


def test_names_that_differ_only_in_case_are_refused(folder: Path) -> None:
    (folder / "LICENSE").touch()
    (folder / "license").touch()
    refused(folder, "upper and lower case")


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "aB3" * 12,
        "ms-12345678-1234-1234-1234-123456789abc",
        "AKIA" + "ABCDEFGH12345678",
        "ghp_" + "a1" * 18,
        "sk-" + "a1B2" * 10,
        "WANDB_API_KEY=" + "0123456789abcdef" * 2 + "01234567",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
    ],
)
def test_secrets_are_refused_and_not_repeated(folder: Path, secret: str) -> None:
    """autotrain-advanced#762: a token in a published config."""
    config = json.loads((folder / "config.json").read_text()) | {"note": secret}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with pytest.raises(InputError) as caught:
        read_folder(folder)
    assert "config.json" in str(caught.value) and "line" in str(caught.value)
    assert secret not in str(caught.value)


def test_secrets_in_a_header_are_refused(folder: Path) -> None:
    from tests.tiny import draft_tensors, native_config, write_tensors

    tensors = draft_tensors(native_config())
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt", "token": "hf_" + "a" * 34})
    refused(folder, "model.safetensors", "Hugging Face token")


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, "config.json")


def test_files_too_large_for_a_hub_are_refused(tmp_path: Path) -> None:
    file = PublishedFile("model.safetensors", tmp_path / "model.safetensors", 60_000_000_000, "0" * 64)
    require_sizes([file], ["hf"])
    with pytest.raises(InputError, match="ModelScope"):
        require_sizes([file], ["hf", "ms"])


def test_a_file_that_changes_is_noticed(folder: Path) -> None:
    draft = read_folder(folder)
    draft.require_unchanged()
    os.utime(folder / "model.safetensors")
    with pytest.raises(ConflictError, match="changed"):
        draft.require_unchanged()


def test_every_byte_is_hashed_once(folder: Path) -> None:
    seen: list[int] = []
    read_folder(folder, seen.append)
    assert sum(seen) == sum(path.stat().st_size for path in folder.iterdir())
