"""Every fault raises exactly its errors, and every good draft none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3pack.documents import schema_problems
from eagle3pack.draft.target import parse_target_config
from eagle3pack.verify.context import Context, Options
from eagle3pack.verify.report import Examination, build_report, examine
from tests.verify.drafts import GOOD, Draft, make, native, write_target
from tests.verify.faults import FAULTS, Fault


def examined(draft: Draft, folder: Path, **options: object) -> tuple[Context, Examination]:
    """Write a draft and its target, and ask every check."""
    draft.write(folder / "draft")
    write_target(folder / "target", draft.target)
    context = Context(
        folder / "draft",
        Options(**options),  # type: ignore[arg-type]
        target=parse_target_config(draft.target, where="target", name="org/target"),
        target_text=str(folder / "target"),
    )
    return context, examine(context)


def ids(examination: Examination, severity: str) -> set[str]:
    """The failed checks of a severity."""
    return {outcome.check.id for outcome in examination.failed(severity)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.row} {fault.name}")
def test_a_fault_raises_exactly_its_errors(fault: Fault, tmp_path: Path) -> None:
    context, examination = examined(fault.make(), tmp_path, **fault.options)

    assert ids(examination, "error") == fault.errors, [
        (o.check.id, f.message) for o in examination.failed("error") for f in o.findings
    ]
    assert fault.warnings <= ids(examination, "warning")
    report = build_report(context, examination, source="x", revision=None, strict=False)
    assert not schema_problems(report, "report")
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize("kind", ["fp8", "packed"])
def test_a_quantised_draft_has_no_error(kind: str, tmp_path: Path) -> None:
    def quantise(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = tensors.pop(name)
            if kind == "fp8":
                tensors[name] = weight.to(torch.float8_e4m3fn)
            else:
                tensors[f"{name}_packed"] = torch.zeros(
                    weight.shape[0], weight.shape[1] // 8, dtype=torch.int32
                )
            tensors[f"{name}_scale"] = torch.ones(weight.shape[0], 1, dtype=weight.dtype)
        save_file(tensors, path, metadata={"format": "pt"})

    draft = make(native(quantization_config={"quant_method": "compressed-tensors"}))
    draft.afterwards.append(quantise)
    _, examination = examined(draft, tmp_path)

    assert ids(examination, "error") == set()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("declared", [False, True])
def test_float8_without_a_scale_is_an_error(declared: bool, scaled: bool, tmp_path: Path) -> None:
    def store_as_float8(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for name in [name for name in tensors if "self_attn" in name]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            if scaled:
                tensors[f"{name}_scale"] = torch.ones(1)
        save_file(tensors, path, metadata={"format": "pt"})

    draft = make(native(quantization_config={"quant_method": "fp8"} if declared else None))
    draft.afterwards.append(store_as_float8)
    _, examination = examined(draft, tmp_path)

    # a scale that no quantisation declares is no tensor of the draft
    assert ids(examination, "error") == ({"C28"} if not scaled else set() if declared else {"T03"})
    assert ("F13" in ids(examination, "warning")) is not declared
    if not scaled:
        (finding,) = next(o.findings for o in examination.failed("error"))
        assert finding.message.startswith("4 weights are stored quantised without a scale, such as midlayer.")


def test_two_keys_that_name_one_wrong_dtype_are_one_finding(tmp_path: Path) -> None:
    draft = make(native(torch_dtype="bfloat16", dtype="bfloat16"), dtype="F32")
    _, examination = examined(draft, tmp_path)

    (told,) = [o.findings for o in examination.all if o.check.id == "F13"]
    assert [finding.message for finding in told] == [
        "torch_dtype and dtype are bfloat16, the weights are float32"
    ]


def test_what_says_mla_of_a_plain_draft_is_told(tmp_path: Path) -> None:
    draft = make(native(model_type="deepseek_v3", kv_lora_rank=512))
    _, examination = examined(draft, tmp_path)

    assert ids(examination, "error") == set()
    assert "C04" in ids(examination, "warning") and "C31" in ids(examination, "note")


@pytest.mark.parametrize(("rows", "fix"), [(4 * 32, "Write 4 if"), (7 * 32, "Export"), (50, "Export")])
def test_no_number_of_heads_is_proposed_that_does_not_divide(rows: int, fix: str, tmp_path: Path) -> None:
    draft = make(native(num_key_value_heads=8))
    for name in ("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"):
        dtype, (_, columns), data = draft.tensors[name]
        draft.tensors[name] = (dtype, (rows, columns), data[: rows * columns * 2])
    _, examination = examined(draft, tmp_path)

    (told,) = [o.findings for o in examination.all if o.check.id == "C10"]
    assert len(told) == 2 and all(finding.fix.startswith(fix) for finding in told)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_draft_has_no_error(name: str, tmp_path: Path) -> None:
    _, examination = examined(GOOD[name](), tmp_path)

    assert ids(examination, "error") == set(), [
        (o.check.id, f.message) for o in examination.failed("error") for f in o.findings
    ]
