"""`eagle3pack convert` on whole drafts: what changes, what stays, what is recorded."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3pack.checkpoint.digest import draft_digest, draft_files, sha256_file
from eagle3pack.convert.command import ConvertOptions, run_convert
from eagle3pack.convert.merging.attention import from_matrices, to_matrices
from eagle3pack.convert.merging.merge import MergeOptions, merge
from eagle3pack.convert.merging.rotary import rope_spec
from eagle3pack.convert.summary import Summary
from eagle3pack.documents import schema_problems
from eagle3pack.draft.config import parse_draft_config
from tests.cli import Cli
from tests.tiny import (
    draft_tensors,
    native_config,
    speculators_config,
    target_config,
    write_draft,
    write_tensors,
)

K, V = "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight"


class NoProgress:
    """Progress that nobody watches."""

    def __call__(self, label: str, total: int, *, unit: str = "B") -> NoProgress:
        self.done = 0
        return self

    def __enter__(self) -> Any:
        return self.advance

    def __exit__(self, *_: object) -> None: ...

    def advance(self, count: int) -> None:
        self.done += count


def convert(source: Path, out: Path, **options: Any) -> Summary:
    return run_convert(
        str(source), str(out), ConvertOptions(**options), say=lambda text: None, progress=NoProgress()
    )


def load(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def record(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "eagle3pack.json").read_text())
    return document


def test_only_keys_values_and_the_count_change(tmp_path: Path) -> None:
    source, out = write_draft(tmp_path / "mha"), tmp_path / "gqa"
    convert(source, out, num_kv_heads=2, prove=True)
    before, after = load(source), load(out)
    assert list(before) == list(after)
    for name in before:
        if name in (K, V):
            heads = before[name].float().reshape(2, 4, 16, -1)
            total = heads[:, 0] + heads[:, 1] + heads[:, 2] + heads[:, 3]  # in this order
            assert torch.equal(after[name].reshape(2, 16, -1), (total / 4).bfloat16())
        else:
            assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    assert list(old) == list(new)
    assert {key: new[key] for key in new if new[key] != old[key]} == {"num_key_value_heads": 2}


def test_first_keeps_the_first_head_of_each_group(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    convert(source, tmp_path / "gqa", num_kv_heads=2, method="first")
    heads = load(source)[K].reshape(2, 4, 16, -1)
    assert torch.equal(load(tmp_path / "gqa")[K].reshape(2, 16, -1), heads[:, 0])


def test_the_record_says_what_was_done_and_holds_its_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    source, out = write_draft(tmp_path / "mha"), tmp_path / "gqa"
    convert(source, out, num_kv_heads=2, hash_source=True)
    found = record(out)
    assert schema_problems(found, "conversion") == []
    assert found["created"] == "2023-11-14T22:13:20Z"
    assert found["source"]["id"] == "mha"
    assert str(tmp_path) not in json.dumps(found)
    assert found["source"]["files"][0]["sha256"] == sha256_file(source / "model.safetensors")
    assert found["changed_tensors"] == [K, V]
    (layer,) = found["layers"]
    assert layer["head_map"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    errors = layer["relative_errors"]
    assert [len(group) for group in errors["k"]] == [4, 4]
    assert all(0.5 < error < 1.2 for group in errors["v"] for error in group)  # random heads
    files = found["output"]["files"]
    assert {file["path"] for file in files} == {path.name for path in draft_files(out)}
    for file in files:
        data = (out / file["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"])
    assert found["output"]["draft_digest"] == draft_digest((f["path"], f["size"], f["sha256"]) for f in files)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    source = write_draft(tmp_path / "mha")
    for name in ("one", "two"):
        convert(source, tmp_path / name, num_kv_heads=4)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_the_same_count_is_a_copy_to_the_byte(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha", shards=3)
    convert(source, tmp_path / "copy", num_kv_heads=8)
    for path in source.iterdir():
        assert path.read_bytes() == (tmp_path / "copy" / path.name).read_bytes()
    assert record(tmp_path / "copy")["method"]["name"] == "copy"


def test_converting_the_output_to_its_own_count_is_the_identity(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    convert(source, tmp_path / "once", num_kv_heads=2)
    convert(tmp_path / "once", tmp_path / "twice", num_kv_heads=2)
    for path in draft_files(tmp_path / "once"):
        assert path.read_bytes() == (tmp_path / "twice" / path.name).read_bytes()
    assert record(tmp_path / "twice")["source"]["previous"] == record(tmp_path / "once")


def attention(
    weights: dict[str, torch.Tensor], heads: int, kv_heads: int, inputs: torch.Tensor
) -> torch.Tensor:
    """Causal attention of layer 0 in float64, RoPE included, as engines run GQA."""
    depth, length = 16, inputs.shape[0]
    angles = torch.arange(length)[:, None] * 10000.0 ** (
        -torch.arange(0, depth, 2, dtype=torch.float64) / depth
    )
    cos, sin = (torch.cat([part, part], 1) for part in (angles.cos(), angles.sin()))

    def project(name: str, count: int) -> torch.Tensor:
        return (inputs @ weights[f"midlayer.self_attn.{name}_proj.weight"].double().T).reshape(
            length, count, depth
        )

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = torch.cat([-x[..., depth // 2 :], x[..., : depth // 2]], -1)
        return x * cos[:, None] + half * sin[:, None]

    q, k, v = rotate(project("q", heads)), rotate(project("k", kv_heads)), project("v", kv_heads)
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / depth**0.5
    mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)
    out = torch.einsum("hij,jhd->ihd", (scores + mask).softmax(-1), v).reshape(length, -1)
    return out @ weights["midlayer.self_attn.o_proj.weight"].double().T


def test_a_draft_with_equal_heads_attends_bit_for_bit_the_same(tmp_path: Path) -> None:
    raw = native_config()
    tensors = draft_tensors(raw)
    for name in ("k", "v"):
        dtype, shape, data = tensors[f"layers.0.self_attn.{name}_proj.weight"]
        head = len(data) // 8
        repeated = b"".join(data[4 * g * head : (4 * g + 1) * head] * 4 for g in range(2))
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = (dtype, shape, repeated)
    source = write_draft(tmp_path / "mha", raw, tensors=tensors)
    convert(source, tmp_path / "gqa", num_kv_heads=2)
    inputs = torch.randn(7, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = attention(load(source), 8, 8, inputs)
    after = attention(load(tmp_path / "gqa"), 8, 2, inputs)
    assert torch.equal(before, after)


@pytest.mark.parametrize("method", ["procrustes", "svd", "als"])
@pytest.mark.parametrize("raw", [native_config(attention_bias=True), speculators_config()])
def test_closed_forms_change_queries_keys_values_and_output(
    tmp_path: Path, method: str, raw: dict[str, Any]
) -> None:
    source, out = write_draft(tmp_path / "mha", raw), tmp_path / "gqa"
    summary = convert(source, out, num_kv_heads=2, method=method, metric="norm", prove=True)
    found = record(out)
    assert schema_problems(found, "conversion") == []
    parts = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {name.split(".")[2] for name in found["changed_tensors"]} == parts
    assert found["method"]["parameters"]["metric"] == "norm"
    before, after = load(source), load(out)
    for name, old in before.items():
        if name not in found["changed_tensors"]:
            assert torch.equal(old.view(torch.uint8), after[name].view(torch.uint8)), name
    merging = found["layers"][0]["merging"]
    assert summary.quality["k_kept_energy"] == merging["result"]["kept_keys"]
    assert merging["result"]["kept_values"] > merging["mean"]["kept_values"]
    assert all(after[name].isfinite().all() for name in found["changed_tensors"])


def test_what_is_written_is_what_the_method_computed(tmp_path: Path) -> None:
    raw = native_config(num_hidden_layers=2)
    source = write_draft(tmp_path / "mha", raw)
    groups = tmp_path / "groups.json"
    groups.write_text("[[0, 2, 4, 6], [1, 3, 5, 7]]")
    convert(source, tmp_path / "gqa", num_kv_heads=2, method="als", grouping=str(groups))
    written, given = load(tmp_path / "gqa"), load(source)
    spec = rope_spec(parse_draft_config(raw, where="c").rope, 16)
    options = MergeOptions(2, "als", grouping=((0, 2, 4, 6), (1, 3, 5, 7)), max_distance=512)
    for prefix in ("midlayer.self_attn.", "layers.1.self_attn."):
        parts = {name.removeprefix(prefix): x for name, x in given.items() if name.startswith(prefix)}
        for part, matrix in to_matrices(merge(from_matrices(parts, 16), spec, options).weights).items():
            assert torch.equal(written[prefix + part], matrix), part
    assert [layer["head_map"] for layer in record(tmp_path / "gqa")["layers"]] == [
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    ] * 2


def test_a_dry_run_of_a_closed_form_tells_what_it_would_keep(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    summary = convert(source, tmp_path / "gqa", num_kv_heads=2, method="als", dry_run=True)
    assert summary.quality["v_kept_energy"] > summary.quality["v_kept_energy_by_mean"]
    assert not (tmp_path / "gqa").exists()


@st.composite
def drafts(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of write_draft and the count to convert to."""
    kv_heads = draw(st.sampled_from([2, 4, 8]))
    layer = {
        "num_key_value_heads": kv_heads,
        "attention_bias": draw(st.booleans()),
        "num_hidden_layers": draw(st.integers(1, 2)),
    }
    native = draw(st.booleans())
    vocabulary = draw(st.sampled_from([96, 40]))
    raw = (
        native_config(**layer, fc_norm=draw(st.booleans()))
        if native
        else speculators_config(**layer, model_type=draw(st.sampled_from(["llama", "qwen3"])))
    )
    raw["draft_vocab_size"] = vocabulary
    return {
        "raw": raw,
        "dtype": draw(st.sampled_from(["BF16", "F16", "F32"])),
        "seed": draw(st.integers(0, 99)),
        "prefix": draw(st.sampled_from(["midlayer.", "layers.0.", "model.layers.0."])),
        "shards": draw(st.integers(1, 3)),
        "to": draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= kv_heads])),
        "layout": draw(st.sampled_from(["keep", "midlayer", "layers"])),
        "shard_size": draw(st.sampled_from([20_000, 5_000_000_000])),
    }


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(drafts())
def test_every_draft_keeps_all_but_its_keys_and_values(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("draft")
    kept = {key: case.pop(key) for key in ("to", "layout", "shard_size")}
    source = write_draft(folder / "source", case.pop("raw"), **case)
    summary = convert(
        source,
        folder / "out",
        num_kv_heads=kept["to"],
        layout=kept["layout"],
        shard_size=kept["shard_size"],
        prove=True,
    )
    before, after = load(source), load(folder / "out")
    changed = set(record(folder / "out")["changed_tensors"])
    renamed = summary.plan.renamed
    assert {renamed.get(name, name) for name in before} == set(after)
    for name, old in before.items():
        new = after[renamed.get(name, name)]
        assert old.dtype == new.dtype
        if renamed.get(name, name) in changed:
            assert any(part in name for part in ("k_proj", "v_proj"))
            assert new.shape == (kept["to"] * 16, *old.shape[1:])
        else:
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8)), name
    config = parse_draft_config(json.loads((folder / "out" / "config.json").read_text()), where="out")
    assert config.num_key_value_heads == kept["to"]
    assert schema_problems(record(folder / "out"), "conversion") == []


def test_sharded_output_has_a_correct_index(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    convert(source, tmp_path / "gqa", num_kv_heads=2, shard_size=20_000)
    index = json.loads((tmp_path / "gqa" / "model.safetensors.index.json").read_text())
    total = 0
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "gqa" / file, "pt") as opened:
            tensor = opened.get_tensor(name)
            total += tensor.numel() * tensor.element_size()
    assert index["metadata"]["total_size"] == total
    assert "model.safetensors.index.json" in {f["path"] for f in record(tmp_path / "gqa")["output"]["files"]}


def test_the_portable_form_drops_the_identity_map_of_a_full_vocabulary(tmp_path: Path) -> None:
    raw = native_config()
    tensors = draft_tensors(raw)
    tensors["d2t"] = ("I64", (96,), bytes(8 * 96))
    tensors["t2d"] = ("BOOL", (96,), b"\1" * 96)
    source = write_draft(tmp_path / "mha", raw, tensors=tensors, prefix="model.layers.0.")
    convert(source, tmp_path / "gqa", num_kv_heads=2, canonical=True)
    names = set(load(tmp_path / "gqa"))
    assert not names & {"d2t", "t2d"}
    assert K in names
    config = json.loads((tmp_path / "gqa" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert {d["name"] for d in record(tmp_path / "gqa")["dropped_tensors"]} == {"d2t", "t2d"}


def write_target(folder: Path, embedding: Any, head: Any, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(target_config(**config)))
    write_tensors(
        folder / "model.safetensors", {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    )
    return folder


def test_strip_shared_leaves_out_what_equals_the_target_and_nothing_else(tmp_path: Path) -> None:
    raw = native_config()
    tensors = draft_tensors(raw)
    embedding, head = tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    other = ("BF16", (96, 64), bytes(2 * 96 * 64))
    source = write_draft(tmp_path / "mha", raw, tensors=tensors)
    target = write_target(tmp_path / "target", embedding, other)
    summary = convert(source, tmp_path / "gqa", target=str(target), strip_shared=True)
    names = set(load(tmp_path / "gqa"))
    assert "embed_tokens.weight" not in names
    assert "lm_head.weight" in names
    assert summary.not_stripped == {"lm_head.weight": "its values differ from the target's"}
    assert summary.after["key_value_heads"] == 2  # the target's
    dropped = record(tmp_path / "gqa")["dropped_tensors"]
    assert [(d["name"], d["bytes"]) for d in dropped] == [("embed_tokens.weight", 2 * 96 * 64)]
    both = write_target(tmp_path / "both", embedding, head)
    convert(source, tmp_path / "less", target=str(both), strip_shared=True)
    assert not set(load(tmp_path / "less")) & {"embed_tokens.weight", "lm_head.weight"}


def test_a_head_over_a_smaller_vocabulary_is_never_stripped(tmp_path: Path) -> None:
    raw = native_config(draft_vocab_size=40)
    tensors = draft_tensors(raw)
    source = write_draft(tmp_path / "mha", raw, tensors=tensors)
    target = write_target(tmp_path / "target", tensors["embed_tokens.weight"], tensors["embed_tokens.weight"])
    summary = convert(source, tmp_path / "gqa", target=str(target), strip_shared=True)
    assert "smaller vocabulary" in summary.not_stripped["lm_head.weight"]


def test_a_pickled_draft_becomes_safetensors(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "st")
    tensors = load(source)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((source / "config.json").read_bytes())
    torch.save(tensors, pickled / "pytorch_model.bin")
    convert(pickled, tmp_path / "gqa", num_kv_heads=2)
    convert(source, tmp_path / "gqa2", num_kv_heads=2)
    ours, theirs = load(tmp_path / "gqa"), load(tmp_path / "gqa2")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    convert(pickled, tmp_path / "same", num_kv_heads=8)  # no copy: a pickle is never written
    assert [path.name for path in draft_files(tmp_path / "same")] == ["config.json", "model.safetensors"]


def test_the_files_of_a_model_are_copied_and_nothing_else(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    for name in ("tokenizer.json", "LICENSE", "generation_config.json", "optimizer.pt", ".env", "README.md"):
        (source / name).write_text("x")
    (source / ".cache").mkdir()
    convert(source, tmp_path / "gqa", num_kv_heads=2)
    assert {path.name for path in (tmp_path / "gqa").iterdir()} == {
        "config.json",
        "model.safetensors",
        "eagle3pack.json",
        "tokenizer.json",
        "LICENSE",
        "generation_config.json",
    }


def test_a_dry_run_prints_the_plan_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    result = cli("convert", source, tmp_path / "gqa", "--num-kv-heads", 2, "--dry-run")
    assert result.code == 0
    assert "would convert" in result.err
    assert "8 -> 2" in " ".join(result.err.split())
    assert not (tmp_path / "gqa").exists()


def test_json_is_one_object_on_stdout_under_its_schema(cli: Cli, tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    result = cli("convert", source, tmp_path / "gqa", "--num-kv-heads", 2, "--json")
    document = json.loads(result.out)
    assert schema_problems(document, "convert-result") == []
    assert document["before"]["kv_bytes_per_token"] == 2 * 8 * 16 * 2
    assert document["after"]["kv_bytes_per_token"] == 2 * 2 * 16 * 2
    assert document["draft_digest"] == record(tmp_path / "gqa")["output"]["draft_digest"]


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    (source / "model.safetensors").chmod(0o600)
    convert(source, tmp_path / "gqa", num_kv_heads=2)
    (tmp_path / "probe").write_text("")
    expected = stat.S_IMODE((tmp_path / "probe").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "gqa").iterdir()} == {expected}


def test_a_folder_whose_name_is_no_utf8_is_converted(cli: Cli, tmp_path: Path) -> None:
    source = write_draft(tmp_path / os.fsdecode(b"bad\xff"))
    result = cli("convert", source, tmp_path / os.fsdecode(b"out\xff"), "--num-kv-heads", "2")
    assert result.code == 0, result.err
    assert record(tmp_path / os.fsdecode(b"out\xff"))["source"]["id"] == "bad?"


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--retrain-with", (("torchspec", "a"), ("specforge", "b"))),
        ("--calibrate-from", (("a",), ("b",))),
        ("--calibrate-with", (("a",), ("b",))),
    ],
)
def test_an_option_of_which_one_would_be_dropped_is_refused(
    cli: Cli, tmp_path: Path, option: str, values: tuple[tuple[str, ...], ...]
) -> None:
    twice = [word for value in values for word in (option, *value)]
    result = cli("convert", write_draft(tmp_path / "mha"), tmp_path / "gqa", "--num-kv-heads", "2", *twice)
    assert result.code == 2 and option in result.err and "given 2 times" in result.err
    assert not (tmp_path / "gqa").exists()
