"""The draft module against a naive float64 implementation, and the identities that conversion relies on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3pack.draft.tensors import expected_tensors
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.kv_cache import KeyValueCache
from eagle3pack.engine.loading import _require_same_vocabulary, load_draft
from eagle3pack.engine.target import Target
from eagle3pack.errors import InputError, UnsupportedDraftError
from tests.engine.oracle import OracleDraft
from tests.tiny import native_config


def weights_of(draft: DraftModel) -> dict[str, Tensor]:
    """Every tensor of a draft, by logical name."""
    return dict(draft.state_dict())


def random_input(draft: DraftModel, rows: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(draft.config.vocab_size, (rows, width), generator=generator)
    dtype = draft.norm.weight.dtype
    size = draft.config.num_aux_hidden_states * draft.config.target_hidden_size
    states = torch.randn((rows, width, size), generator=generator).to(dtype)
    return tokens, draft.fuse(states), torch.arange(width).expand(rows, width)


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
    ids=["default", "linear", "yarn", "partial"],
)
@pytest.mark.parametrize("layers", [1, 2])
def test_module_equals_the_naive_implementation(
    make_draft: Callable[..., DraftModel], rope: dict[str, Any], layers: int
) -> None:
    changes = {"num_key_value_heads": 4, "num_hidden_layers": layers, **rope}
    draft = make_draft(dtype=torch.float64, **changes)
    table = draft.rotary_table(torch.device("cpu"))
    naive = OracleDraft(native_config(**changes), weights_of(draft), table.frequencies, table.magnitude)
    tokens, hidden, positions = random_input(draft, 1, 6)

    output = draft(tokens, hidden, positions + 90)

    entries = [(90 + t, int(tokens[0, t]), hidden[0, t]) for t in range(6)]
    for t in range(6):
        normed, feedback = naive.run(entries[: t + 1])
        torch.testing.assert_close(output.normed[0, t], normed, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.feedback[0, t], feedback, rtol=1e-5, atol=1e-5)


def test_a_cache_changes_nothing(make_draft: Callable[..., DraftModel]) -> None:
    draft = make_draft(num_key_value_heads=2, num_hidden_layers=2, dtype=torch.float64)
    tokens, hidden, positions = random_input(draft, 3, 9)
    whole = draft(tokens, hidden, positions)
    cache = KeyValueCache(5, torch.device("cpu"))
    cache.reserve(9)

    parts = []
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        at = cache.at(1, [part.start] * 3, part.stop - part.start)
        parts.append(draft(tokens[:, part], hidden[:, part], at, cache).normed)

    torch.testing.assert_close(torch.cat(parts, dim=1), whole.normed)


@pytest.mark.parametrize("layers", [1, 2])
def test_gqa_equals_mha_with_every_head_repeated(make_draft: Callable[..., DraftModel], layers: int) -> None:
    grouped = make_draft(num_key_value_heads=2, num_hidden_layers=layers, dtype=torch.float64)
    full = make_draft(num_key_value_heads=8, num_hidden_layers=layers, dtype=torch.float64)
    state = weights_of(grouped)
    for name, tensor in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = tensor.view(2, 16, -1).repeat_interleave(4, dim=0).reshape(128, -1)
    full.load_state_dict(state)
    inputs = random_input(grouped, 2, 7)

    torch.testing.assert_close(full(*inputs).normed, grouped(*inputs).normed)


def test_d2t_holds_offsets(make_draft: Callable[..., DraftModel]) -> None:
    draft = make_draft(draft_vocab_size=32)  # keeps tokens 0, 3, 6, ... of 96
    assert draft.d2t is not None
    normed = torch.randn(5, 64)

    best = draft.logits(normed).argmax(-1)

    assert draft.greedy(normed).tolist() == (3 * best).tolist()


def test_embeddings_and_head_come_from_the_target_where_the_draft_has_none(
    make_draft: Callable[..., DraftModel], target: Target
) -> None:
    draft = make_draft(target=target, without=("embed_tokens.weight", "lm_head.weight"))

    assert draft.embed_tokens is not None and draft.lm_head is not None
    assert draft.embed_tokens.weight.data_ptr() == target.embedding_weight.data_ptr()
    assert draft.lm_head.weight.data_ptr() == target.head_weight.data_ptr()


def test_own_embeddings_and_head_stay(make_draft: Callable[..., DraftModel], target: Target) -> None:
    draft = make_draft(target=target)

    assert draft.embed_tokens is not None and draft.lm_head is not None
    assert not torch.equal(draft.embed_tokens.weight, target.embedding_weight)
    assert not torch.equal(draft.lm_head.weight, target.head_weight)


@pytest.mark.parametrize(
    ("without", "changes", "problem"),
    [
        (("lm_head.weight",), {"draft_vocab_size": 32}, "needs its own head"),
        (
            ("embed_tokens.weight",),
            {"hidden_size": 32, "target_hidden_size": 64},
            "embed_tokens.weight is not",
        ),
        (
            ("embed_tokens.weight",),
            {"vocab_size": 97, "draft_vocab_size": 96},
            r"\(96, 64\), expected \(97, 64\)",
        ),
        (
            (),
            {"vocab_size": 90, "draft_vocab_size": 90},
            "vocab_size is 90, but the target's tokens go up to 95",
        ),
        ((), {"vocab_size": 120, "draft_vocab_size": 120}, "proposes token 96, the target has 96"),
        (("layers.0.self_attn.k_proj.weight",), {}, "k_proj.weight is missing"),
        (("norm.weight",), {}, "norm.weight is missing"),
        (("d2t",), {"draft_vocab_size": 32}, "d2t is missing"),
        (("input_norm.weight",), {"norm_before_fc": True}, "input_norm.weight is missing"),
        (("fc_norm.2.weight",), {"fc_norm": True}, "fc_norm.2.weight is missing"),
    ],
    ids=str,
)
def test_a_draft_that_lacks_tensors_is_refused(
    make_draft: Callable[..., DraftModel],
    target: Target,
    without: tuple[str, ...],
    changes: dict[str, Any],
    problem: str,
) -> None:
    with pytest.raises(InputError, match=problem):
        make_draft(target=target, without=without, **changes)


def test_a_d2t_of_absolute_ids_is_refused(make_draft: Callable[..., DraftModel], target: Target) -> None:
    draft = make_draft(draft_vocab_size=32)
    assert draft.d2t is not None
    draft.d2t += torch.arange(32)  # as some trainers write it

    with pytest.raises(InputError, match="proposes token") as error:
        _require_same_vocabulary(draft, target)
    assert "offsets" in error.value.hint


def test_an_output_bias_may_be_left_out(make_draft: Callable[..., DraftModel]) -> None:
    draft = make_draft(attention_bias=True, without=("layers.0.self_attn.o_proj.bias",))

    assert not weights_of(draft)["layers.0.self_attn.o_proj.bias"].any()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_act": "gelu"}, "silu only"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ],
)
def test_what_is_not_computed_is_refused(
    make_draft: Callable[..., DraftModel], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UnsupportedDraftError, match=problem):
        make_draft(**changes)


def test_every_tensor_of_the_inventory_has_its_parameter(make_draft: Callable[..., DraftModel]) -> None:
    draft = make_draft(
        fc_norm=True,
        norm_before_fc=True,
        attention_bias=True,
        num_hidden_layers=2,
        draft_vocab_size=32,
    )
    expected = expected_tensors(draft.config)

    assert set(weights_of(draft)) == set(expected) - {"t2d"}
    assert all(tuple(t.shape) == expected[name].shape for name, t in weights_of(draft).items())


def test_weights_that_the_config_does_not_describe_are_refused(
    tmp_path: Path, make_draft: Callable[..., DraftModel]
) -> None:
    from tests.tiny import draft_tensors, write_draft

    tensors = draft_tensors(native_config())  # eight key/value heads
    folder = write_draft(tmp_path / "mixed", native_config(num_key_value_heads=2), tensors=tensors)

    with pytest.raises(InputError, match=r"k_proj.weight is \[128, 128\], expected \[32, 128\]"):
        load_draft(folder)
