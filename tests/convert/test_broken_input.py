"""Bad input gets one clear error, the documented exit code, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli import Cli
from tests.tiny import draft_tensors, native_config, target_config, write_draft, write_tensors


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def lie_about_offsets(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        header["norm.weight"]["data_offsets"][0] += 2

    rewrite_header(folder / "model.safetensors", change)


def put_nan(folder: Path) -> None:
    tensors = draft_tensors(native_config())
    dtype, shape, data = tensors["layers.0.self_attn.v_proj.weight"]
    tensors["layers.0.self_attn.v_proj.weight"] = (dtype, shape, data[:-2] + b"\xc0\x7f")
    write_draft(folder, tensors=tensors)


def name_twice(folder: Path) -> None:
    tensors = draft_tensors(native_config())
    tensors["model.layers.0.hidden_norm.weight"] = tensors["layers.0.hidden_norm.weight"]
    write_tensors(folder / "model.safetensors", tensors)


def add_tensor(name: str) -> Callable[[Path], None]:
    def add(folder: Path) -> None:
        tensors = draft_tensors(native_config())
        tensors[name] = ("BF16", (2,), b"\0\0\0\0")
        write_draft(folder, tensors=tensors)

    return add


def quantise(folder: Path) -> None:
    tensors = draft_tensors(native_config())
    _, shape, data = tensors["layers.0.self_attn.k_proj.weight"]
    tensors["layers.0.self_attn.k_proj.weight"] = ("U8", shape, data[::2])
    write_draft(folder, tensors=tensors)


def drop_tensor(folder: Path) -> None:
    tensors = draft_tensors(native_config())
    del tensors["norm.weight"]
    write_draft(folder, tensors=tensors)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(native_config(**changes))) and None


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def loop(folder: Path) -> None:
    remove_weights(folder)
    (folder / "model.safetensors").symlink_to("model.safetensors")


def escape(folder: Path) -> None:
    (folder.parent / "secret").write_text("token")
    (folder / "LICENSE").symlink_to("../secret")


BROKEN: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "empty folder": (empty, 3, "config.json: does not exist"),
    "config only": (remove_weights, 3, "holds no weights"),
    "truncated file": (truncate, 3, "is truncated"),
    "header lying about offsets": (lie_about_offsets, 3, "norm.weight"),
    "LFS pointer": (
        write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        3,
        "is a Git LFS pointer",
    ),
    "name twice": (name_twice, 3, "are two spellings of one tensor"),
    "NaN": (put_nan, 3, "v_proj.weight holds NaN or infinity"),
    "missing tensor": (drop_tensor, 3, "the tensor norm.weight is missing"),
    "more layers than tensors": (config(num_hidden_layers=40), 3, "the tensor layers.1.self_attn.q_proj"),
    "wrong head counts": (config(num_key_value_heads=4), 3, "config.json makes it [64, 128]"),
    "heads that do not divide": (config(num_key_value_heads=3), 3, "is not a multiple of"),
    "MLA by its config": (config(architectures=["Eagle3DeepseekV2ForCausalLM"]), 3, "an MLA draft"),
    "MLA by its tensors": (add_tensor("layers.0.self_attn.kv_a_proj_with_mqa.weight"), 3, "an MLA draft"),
    "P-EAGLE": (add_tensor("mask_hidden"), 3, "a P-EAGLE head"),
    "fused projections": (add_tensor("layers.0.self_attn.qkv_proj.weight"), 3, "are fused"),
    "quantised": (quantise, 3, "quantised heads cannot be merged"),
    "unreadable JSON": (write("config.json", b'{"hidden_size": 64,'), 3, "is not valid JSON"),
    "not UTF-8": (write("config.json", b'{"a": "\xff"}'), 3, "is not UTF-8"),
    "a key twice": (write("config.json", b'{"a": 1, "a": 2}'), 3, "the key 'a' stands twice"),
    "config is a list": (write("config.json", b"[]"), 3, "must hold a JSON object"),
    "symlink loop": (loop, 3, "is a symlink that leads back to itself"),
    "symlink out of the folder": (escape, 3, "is a symlink to"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_input(cli: Cli, tmp_path: Path, fault: str) -> None:
    breaking, code, message = BROKEN[fault]
    source = write_draft(tmp_path / "mha")
    breaking(source)
    before = sorted(path.name for path in tmp_path.iterdir())
    result = cli("convert", source, tmp_path / "gqa", "--num-kv-heads", 2)
    assert (result.code, message in result.err) == (code, True), result.err
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_missing_shard(cli: Cli, tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha", shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    result = cli("convert", source, tmp_path / "gqa", "--num-kv-heads", 2)
    assert result.code == 3
    assert "model-00002-of-00003.safetensors" in result.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--num-kv-heads", 3], 2, "Numbers that do: 1, 2, 4, 8."),
        (["--num-kv-heads", 16], 2, "does not divide the draft's 8"),
        (["--num-kv-heads", 0], 2, "does not divide the draft's 8"),
        ([], 2, "Give --num-kv-heads (1, 2, 4, 8), or --target to take its number."),
        (["--num-kv-heads", 2, "--strip-shared"], 2, "Give --target."),
        (["--num-kv-heads", 2, "--shard-size", "big"], 2, "is no size"),
        (["--num-kv-heads", 2, "--method", "median"], 2, "'median' is not one of"),
        (["--num-kv-heads", 2, "--method", "als", "--grouping", "none.json"], 2, "--grouping"),
        (["--num-kv-heads", 2, "--grouping", "similarity"], 2, "takes no such setting"),
        (["--num-kv-heads", 2, "--metric", "norm"], 2, "takes no such setting"),
        (["--num-kv-heads", 2, "--max-distance", 5], 2, "takes no such setting"),
        (["--num-kv-heads", 2, "--method", "als", "--max-distance", 10**8], 2, "at most 1,048,576"),
        (["--num-kv-heads", 2, "--method", "svd", "--refit-output", "none"], 2, "o_proj has to follow"),
        (["--target", "no/such/folder"], 3, "no such folder or config.json"),
    ],
)
def test_wrong_options(cli: Cli, tmp_path: Path, arguments: list[object], code: int, message: str) -> None:
    source = write_draft(tmp_path / "mha")
    result = cli("convert", source, tmp_path / "gqa", *arguments)
    assert (result.code, message in result.err) == (code, True), result.err
    assert not (tmp_path / "gqa").exists()


def test_a_target_whose_heads_do_not_divide_lists_the_counts_that_do(cli: Cli, tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    target = tmp_path / "target.json"
    target.write_text(json.dumps(target_config(num_attention_heads=6, num_key_value_heads=3)))
    result = cli("convert", source, tmp_path / "gqa", "--target", target)
    assert result.code == 2
    assert "3, the target's number, does not divide" in result.err and "1, 2, 4, 8" in result.err


@pytest.mark.parametrize(
    ("target", "message"),
    [("draft", "is an EAGLE3 draft, not the model"), ("draft/model.safetensors", "is a file of weights")],
)
def test_what_is_no_target_is_named(cli: Cli, tmp_path: Path, target: str, message: str) -> None:
    source = write_draft(tmp_path / "draft")
    result = cli("convert", source, tmp_path / "gqa", "--target", tmp_path / target)
    assert result.code == 2 and message in result.err


def test_a_missing_source_says_how_to_name_a_hub(cli: Cli, tmp_path: Path) -> None:
    result = cli("convert", tmp_path / "nothing", tmp_path / "gqa", "--num-kv-heads", 2)
    assert result.code == 3
    assert "hf:ORG/NAME" in result.err


def test_an_existing_output_is_refused_and_kept(cli: Cli, tmp_path: Path) -> None:
    source, out = write_draft(tmp_path / "mha"), write_draft(tmp_path / "gqa", seed=1)
    kept = (out / "model.safetensors").read_bytes()
    result = cli("convert", source, out, "--num-kv-heads", 2)
    assert result.code == 5
    assert "--overwrite" in result.err
    assert (out / "model.safetensors").read_bytes() == kept
    assert cli("convert", source, out, "--num-kv-heads", 2, "--overwrite").code == 0
    assert (out / "model.safetensors").read_bytes() != kept
    assert (out / "eagle3pack.json").exists()


def test_overwriting_that_fails_keeps_what_was_there(cli: Cli, tmp_path: Path) -> None:
    source, out = write_draft(tmp_path / "mha"), write_draft(tmp_path / "gqa", seed=1)
    put_nan(source)
    kept = (out / "model.safetensors").read_bytes()
    assert cli("convert", source, out, "--num-kv-heads", 2, "--overwrite").code == 3
    assert (out / "model.safetensors").read_bytes() == kept


@pytest.mark.parametrize("where", ["mha", "mha/inner", "."])
def test_source_and_output_must_lie_apart(cli: Cli, tmp_path: Path, where: str) -> None:
    source = write_draft(tmp_path / "mha")
    before = sorted(path.name for path in source.iterdir())
    result = cli("convert", source, tmp_path / where, "--num-kv-heads", 2, "--overwrite")
    assert result.code in (2, 5), result.err
    assert sorted(path.name for path in source.iterdir()) == before


def test_a_read_only_folder(tmp_path: Path) -> None:
    unprivileged = os.geteuid() == 0  # root may write anywhere
    if unprivileged and subprocess.run([*NOBODY, sys.executable, "-c", "pass"], check=False).returncode:
        pytest.skip("no way to run this interpreter as another user")
    source = write_draft(tmp_path / "mha")
    (source / "model.safetensors").chmod(0o644)
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:  # pytest's own folders are closed to others
            folder.chmod(0o755)
    result = run_cli(source, locked / "gqa", unprivileged=unprivileged)
    assert result.returncode == 4, result.stderr
    assert "may not be written" in result.stderr


NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def run_cli(source: Path, out: Path, *, unprivileged: bool = False, **options: Any) -> Any:
    command = [sys.executable, "-m", "eagle3pack", "convert", str(source), str(out), "--num-kv-heads", "2"]
    if unprivileged:
        command = [*NOBODY, *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    import resource

    source = write_draft(tmp_path / "mha")
    limit = (source / "model.safetensors").stat().st_size // 2

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = run_cli(source, tmp_path / "gqa", preexec_fn=small_files)
    assert result.returncode == 7, result.stderr
    assert "could not be written" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mha"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_no_output(tmp_path: Path, sent: signal.Signals) -> None:
    source = write_draft(tmp_path / "mha")
    out = tmp_path / "gqa"
    slow = (  # the same command, held up after the first block that it writes
        "import sys, time\nimport eagle3pack.convert.compute as compute\n"
        "pool = compute.pool_heads\n"
        "def held(*args, **kwargs):\n"
        "    for part in pool(*args, **kwargs):\n"
        "        yield part\n"
        "        print('pooling', flush=True)\n"
        "        time.sleep(60)\n"
        "compute.pool_heads = held\n"
        "from eagle3pack.cli import main\nmain()\n"
    )
    command = [sys.executable, "-c", slow, "convert", str(source), str(out), "--num-kv-heads", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "pooling\n"
        process.send_signal(sent)
        started = time.monotonic()
        _, messages = process.communicate(timeout=20)
        assert time.monotonic() - started < 10
    assert not out.exists()
    if sent != signal.SIGKILL:
        assert process.returncode == 130
        assert "Traceback" not in messages
        assert [path.name for path in tmp_path.iterdir()] == ["mha"]
    assert run_cli(source, out).returncode == 0  # what a killed run left is no hindrance, and goes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gqa", "mha"]
