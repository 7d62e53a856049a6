"""The shipped draft on text that its real target wrote: errors of calibrated merges, and what is accepted.

Recording takes a minute of one core, everything else half a minute.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3pack.checkpoint.header import read_header
from eagle3pack.convert import calibrate
from eagle3pack.convert.command import ConvertOptions, run_convert
from eagle3pack.convert.merging.attention import AttentionWeights, from_matrices
from eagle3pack.convert.merging.calibration import Calibration, read_calibration
from eagle3pack.convert.merging.fidelity import attention_outputs, output_error
from eagle3pack.convert.merging.merge import MergeOptions, merge
from eagle3pack.convert.merging.replay import Replay, replayable, stored_rows, surroundings
from eagle3pack.convert.merging.rotary import rope_spec
from eagle3pack.documents import read_json_object
from eagle3pack.draft.config import parse_draft_config
from eagle3pack.engine.counters import mean_accepted_length, retention, total
from eagle3pack.engine.statistics import retention_interval
from tests.convert.test_command import NoProgress
from tests.integration.real_models import DRAFT, smollm2_target

pytestmark = pytest.mark.slow
MAX_TOKENS = 112  # of an answer: about 3,400 drafts of the source
CONFIG = parse_draft_config(read_json_object(DRAFT / "config.json"), where=str(DRAFT))
ROPE = rope_spec(CONFIG.rope, CONFIG.head_dim, CONFIG.max_position_embeddings)


def convert(out: Path, **options: object) -> Path:
    run_convert(str(DRAFT), str(out), ConvertOptions(**options), say=print, progress=NoProgress())  # type: ignore[arg-type]
    return out


def tensors(folder: Path) -> dict[str, Tensor]:
    found = load_file(folder / "model.safetensors")
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in found.items()}


def attention(folder: Path) -> AttentionWeights:
    found = {n.split("self_attn.")[1]: x.float() for n, x in tensors(folder).items() if "self_attn." in n}
    return from_matrices(found, CONFIG.head_dim)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """The source draft at work on every turn of the prompts that come with this package."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "MAX_TOKENS", MAX_TOKENS)
        convert(
            folder / "gqa",
            num_kv_heads=4,
            method="svd",
            target=str(smollm2_target()),
            calibrate_with="shipped",
            save_calibration=folder / "c.safetensors",
            dry_run=True,
        )
    return read_calibration(folder / "c.safetensors")


def test_on_real_text_errors_fall_from_mean_to_als_and_ridge_is_never_worse(recorded: Calibration) -> None:
    weights = attention(DRAFT)
    moments = recorded.moments(tensors(DRAFT)["layers.0.hidden_norm.weight"], CONFIG.rms_norm_eps)

    expected = attention_outputs(weights, ROPE, moments.held_out)

    def error(method: str, refit: str | None = None) -> float:
        asked = MergeOptions(4, method, refit, max_distance=8192)  # type: ignore[arg-type]
        merged = merge(weights, ROPE, asked, moments.metric(), moments).weights
        return output_error(expected, merged, ROPE, moments.held_out)

    errors = [error(method) for method in ("mean", "procrustes", "svd", "als")]
    print(errors)
    assert errors == sorted(errors, reverse=True)
    ridge = error("als", "ridge")
    print(ridge)
    assert ridge <= errors[-1] * (1 + 1e-6)


@pytest.mark.parametrize(("heads", "floor"), [(4, 0.97), (1, 0.90)])
def test_data_free_als_keeps_what_is_accepted(
    recorded: Calibration, tmp_path: Path, heads: int, floor: float
) -> None:
    """On the texts of "eagle3pack prompts", which nothing here was fitted to."""
    assert recorded.document["prompts"][0]["name"] == "eagle3pack prompts"
    names = {entry.name: entry for entry in read_header(smollm2_target() / "model.safetensors").tensors}
    embedding = stored_rows(names["model.embed_tokens.weight"])  # the draft shares its target's
    around = surroundings(tensors(DRAFT), embedding, CONFIG)
    replay = Replay(replayable(recorded.stretches, 3), around, ROPE, 3)
    theirs = replay.counters(attention(DRAFT))
    ours = replay.counters(attention(convert(tmp_path / "gqa", num_kv_heads=heads, method="als")))
    engine = recorded.document["generation"]["mean_accepted_length"]
    kept, interval = retention(total(ours), total(theirs)), retention_interval(ours, theirs)
    print(
        f"16 -> {heads}: retained {kept}, {interval}; {total(ours)}; source {total(theirs)}, engine {engine}"
    )
    assert total(theirs).drafts >= 3000
    assert mean_accepted_length(total(theirs)) == pytest.approx(engine, abs=0.01)
    assert kept is not None and kept >= floor
