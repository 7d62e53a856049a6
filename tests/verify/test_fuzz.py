"""No config and no header makes verify raise anything but its own answers."""

from __future__ import annotations

import json
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3pack.documents import load_schema, schema_problems
from eagle3pack.draft.config import parse_draft_config
from eagle3pack.draft.target import parse_target_config
from eagle3pack.errors import Eagle3PackError, UnsupportedDraftError
from eagle3pack.verify.context import Context, Options
from eagle3pack.verify.report import build_report, examine
from eagle3pack.verify.schema import problems
from eagle3pack.verify.text import render
from tests.verify import drafts

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["eagle3", "llama", "Eagle3Speculator", "yarn", 0, 1, 2, 8, [], {}, [1, 2, 3]]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    sorted(
        {
            *drafts.native(),
            *drafts.speculators(),
            *load_schema("draft-config")["properties"],
            *load_schema("draft-config")["$defs"]["layer"]["properties"],
            "norm_before_fc",
            "rotary_dim",
            "auto_map",
            "n_predict",
        }
    )
)
BASES = st.sampled_from(
    [drafts.native, drafts.speculators, drafts.qwen3().raw.copy, drafts.canonical().raw.copy]
)
RELAXED = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TARGET = parse_target_config(drafts.target_config(), where="target", name="org/target")


@st.composite
def mutated_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A good config with some keys replaced, removed or added, at any of its levels."""
    config: dict[str, Any] = json.loads(json.dumps(draw(BASES)()))
    for _ in range(draw(st.integers(1, 3))):
        place = config
        inner = draw(st.sampled_from(["", "transformer_layer_config", "eagle_config"]))
        if isinstance(place.get(inner), dict):
            place = place[inner]
        key = draw(KEYS)
        if draw(st.booleans()):
            place[key] = draw(JSON)
        else:
            place.pop(key, None)
    return config


def answers(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Ask every check, and make text and report of the answers."""
    context = Context(folder, Options(quick=quick, tensor_parallel_size=2), target=TARGET)
    examination = examine(context)
    render(context, examination, source="draft", verbose=True)
    report = build_report(context, examination, source="draft", revision=None, strict=True)
    json.dumps(report, allow_nan=False).encode("utf-8")
    return report


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good draft, whose config the tests overwrite."""
    return drafts.make().write(tmp_path_factory.mktemp("good") / "draft")


@given(config=mutated_configs())
@RELAXED
def test_any_config_gets_an_answer(config: dict[str, Any], good_folder: Path) -> None:
    (good_folder / "config.json").write_text(json.dumps(config))
    report = answers(good_folder, quick=True)
    assert not schema_problems(report, "report")
    try:
        parse_draft_config(json.loads(json.dumps(config)), where="config")
    except UnsupportedDraftError:
        assert {c["id"] for c in report["checks"] if c["status"] == "failed"} & {"C01", "C04"}
    except Eagle3PackError as error:  # what keeps the config from being read is told as an error
        assert report["summary"]["errors"], str(error)


@given(text=st.text(max_size=200) | st.binary(max_size=200))
@RELAXED
def test_any_bytes_for_a_config_get_an_answer(text: str | bytes, good_folder: Path) -> None:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    (good_folder / "config.json").write_bytes(data)
    assert answers(good_folder, quick=True)["summary"]["errors"]


@st.composite
def mutated_headers(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """The header of a good draft with some entries renamed, reshaped or broken, and its data."""
    with tempfile.TemporaryDirectory() as folder:
        path = drafts.make().write(Path(folder) / "draft") / "model.safetensors"
        data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(names))
        entry = header.get(name)
        kind = draw(st.sampled_from(["rename", "shape", "dtype", "value", "transpose"]))
        if kind == "rename" and entry is not None:
            new = draw(
                st.sampled_from([*names, "layers.7.mlp.up_proj.weight", "d2t", "t2d"]) | st.text(max_size=9)
            )
            header[new] = header.pop(name)
        elif kind == "value":
            header[name] = draw(JSON)
        elif isinstance(entry, dict) and kind == "transpose" and isinstance(entry.get("shape"), list):
            entry["shape"] = entry["shape"][::-1]
        elif isinstance(entry, dict):
            entry[kind] = draw(JSON | st.sampled_from(["I64", "F32", "F16", "U8", "BOOL", "F8_E4M3", "I32"]))
    return json.dumps(header).encode(), data[8 + length :]


@given(parts=mutated_headers())
@RELAXED
def test_any_header_gets_an_answer(parts: tuple[bytes, bytes], tmp_path: Path) -> None:
    header, data = parts
    folder = tmp_path / "draft"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(drafts.native()))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    answers(folder, quick=False)


@given(index=st.dictionaries(st.sampled_from(["weight_map", "metadata", "x"]), JSON, max_size=3))
@RELAXED
def test_any_index_gets_an_answer(index: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    if not folder.exists():
        drafts.make(shards=2).write(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    answers(folder, quick=False)


@given(
    record=st.dictionaries(st.sampled_from(sorted(load_schema("conversion")["properties"])), JSON, max_size=6)
)
@RELAXED
def test_any_record_gets_an_answer(record: dict[str, Any], good_folder: Path) -> None:
    (good_folder / "config.json").write_text(json.dumps(drafts.native()))
    (good_folder / "eagle3pack.json").write_text(json.dumps(record))
    answers(good_folder, quick=False)
    (good_folder / "eagle3pack.json").unlink()


@given(config=mutated_configs())
@RELAXED
def test_our_reading_of_the_schema_agrees_with_jsonschema(config: dict[str, Any]) -> None:
    if any(isinstance(value, float) for value in _leaves(config)):
        return  # JSON Schema takes 1.0 for a whole number, engines and we do not; NaN is no JSON
    ours = {
        _parent(problem.path, problem.keyword) for problem in problems(config, load_schema("draft-config"))
    }
    theirs = {
        (tuple(problem.path.split(".")) if problem.path else (), problem.keyword)
        for problem in schema_problems(config, "draft-config")
    }
    assert {path for path, _ in ours} == {path for path, _ in theirs}


def _parent(path: tuple[str, ...], keyword: str) -> tuple[tuple[str, ...], str]:
    return (path[:-1] if keyword == "required" else path), keyword


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


@given(
    config=st.dictionaries(
        st.sampled_from(sorted({*drafts.target_config(), "text_config", "layer_types"})), JSON
    )
)
@RELAXED
def test_any_target_config_is_read_or_refused(config: dict[str, Any]) -> None:
    with suppress(Eagle3PackError):
        parse_target_config({**drafts.target_config(), **config}, where="target", name="target")
