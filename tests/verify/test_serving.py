"""The arithmetic of serving, against figures that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3pack.draft.target import bundled_target, parse_target_config
from eagle3pack.verify.context import Context, Options
from eagle3pack.verify.serving import heads_fit, layer_kv_bytes, serving_facts, target_layer_kv_bytes
from tests.verify import drafts


def facts(raw: dict[str, Any], folder: Path, target: Any, **options: Any) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return serving_facts(Context(folder, Options(**options), target=target, draft_name="org/draft"))


@pytest.mark.parametrize(("heads", "tokens"), [(3, 90_112), (16, 79_104)])
def test_tokens_in_the_pool_are_those_that_vllm_reported(heads: int, tokens: int) -> None:
    """vLLM 0.32 on a CPU: 30 layers of 3 heads of 64, one draft layer, 2 GiB, pages of 128 tokens."""
    per_token = 30 * layer_kv_bytes(3, 64, 1) + layer_kv_bytes(heads, 64, 1)
    assert 128 * (2 * 2**30 // (128 * per_token)) == tokens


def test_the_published_draft_at_four_ranks(tmp_path: Path) -> None:
    target = bundled_target("MiniMaxAI/MiniMax-M3")
    raw = drafts.native(
        hidden_size=6144,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
        vocab_size=200064,
        draft_vocab_size=200064,
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config=None,
    )
    mha = facts(raw, tmp_path / "mha", target, tensor_parallel_size=4)
    assert (mha.kv_bytes_per_token_per_rank, mha.page_size_ratio) == (8192, 16)
    assert target_layer_kv_bytes(target, 4) == 512  # type: ignore[arg-type]
    assert mha.aux_layers_vllm == [2, 30, 57] and mha.aux_layers_sglang == [1, 29, 56]
    assert mha.aux_layers_are_default
    assert json.loads(mha.speculative_config) == {
        "method": "eagle3",
        "model": "org/draft",
        "num_speculative_tokens": 3,
        "attention_backend": "FLASH_ATTN",
    }
    gqa = facts(raw | {"num_key_value_heads": 4}, tmp_path / "gqa", target, tensor_parallel_size=4)
    assert (gqa.kv_bytes_per_token_per_rank, gqa.page_size_ratio) == (512, 1)
    assert mha.kv_bytes_per_token == 16 * gqa.kv_bytes_per_token
    assert "attention_backend" not in json.loads(gqa.speculative_config)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "fits"),
    [(12, kv, 4, kv in (1, 2, 4, 8, 12)) for kv in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12)]
    + [(6, 3, 4, False), (8, 8, 16, False), (8, 8, 1, True)],
)
def test_heads_over_ranks(heads: int, kv_heads: int, ranks: int, fits: bool) -> None:
    assert heads_fit(heads, kv_heads, ranks) == fits


def test_a_latent_cache_is_the_same_on_every_rank() -> None:
    target = parse_target_config(
        drafts.target_config(kv_lora_rank=512, qk_rope_head_dim=64), where="target", name="mla"
    )
    assert target_layer_kv_bytes(target, 1) == target_layer_kv_bytes(target, 8) == 1152


def test_what_is_taken_from_the_target(tmp_path: Path) -> None:
    folder = drafts.without(
        drafts.make(drafts.native(draft_vocab_size=drafts.VOCAB)), "embed_tokens.weight", "lm_head.weight"
    )
    found = serving_facts(Context(folder.write(tmp_path / "draft")))
    assert found.shared_with_target == ["embed_tokens", "lm_head"]
    assert found.shared_bytes == 2 * drafts.VOCAB * drafts.HIDDEN * 2
