"""What vLLM said when it failed, and what we make of it; the strings were measured with vLLM 0.32."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eagle3pack.verify.smoke.explain import KNOWN_FAILURES, explain_log, last_progress, log_error

PREFIX = "(VllmWorker-0 pid=8249) ERROR 11-30 18:08:05 [multiproc_executor.py:953] "
MEASURED = [
    ("RuntimeError: start (0) + length (256) exceeds dimension size (128).", "C10"),
    (
        "ValueError: There is no module or parameter named 'draft_id_to_target_id' in LlamaModel.",
        "V02",
    ),
    ("ValueError: There is no module or parameter named 'model' in LlamaModel. The available", "T02"),
    ("ValueError: There is no module or parameter named 'fc_norm' in LlamaModel.", "C22"),
    ("ValueError: There is no module or parameter named 'verifier_lm_head' in LlamaModel.", "T04"),
    ("ValueError: There is no module or parameter named 'layers.0.self_attn.q_norm' in LlamaModel.", "C03"),
    ("ValueError: There is no module or parameter named 'foo' in LlamaModel.", "T03"),
    (
        "AssertionError: Tried to load weights of size torch.Size([256, 1024])"
        "to a parameter of size torch.Size([256, 768])",
        "T08",
    ),
    (
        "AssertionError: Attempted to load weight (torch.Size([8000])) into parameter (torch.Size([8192]))",
        "V03",
    ),
    ("ValueError: Unsupported activation: gelu. Only silu is supported for now.", "C13"),
    ("AssertionError: num_heads (8) is not divisible by num_kv_heads (3)", "C09"),
    (
        "StrictDataclassClassValidationError: Class validation error for validator 'validate_architecture': "
        "The hidden size (256) is not a multiple of the number of attention heads (9)",
        "C08",
    ),
    ("StrictDataclassFieldValidationError: Field 'use_cache' expected bool, got NoneType", "C05"),
    (
        "KeyError: \"Missing required keys in `rope_parameters` for 'rope_type'='yarn': {'factor'}\"",
        "R03",
    ),
    ("Model architectures ['EagleLlamaForCausalLMEagle3'] are not supported for now.", "C02"),
    ("ValueError: Model architectures ['Eagle3LlamaModel'] are not supported for now.", "C02"),
    ("ValueError: Unrecognized model in d. Should have a `model_type` key in its config.json", "C01"),
    ("Invalid repository ID or local directory specified: '/nowhere'.", "F01"),
    ("IndexError: index 49154 is out of bounds for dimension 0 with size 49152", "V04"),
    ("ValueError: Total number of attention heads (2) must be divisible by tensor parallel size (4).", "K01"),
    (
        "RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested",
        "K08",
    ),
    (
        "NotImplementedError: Layer model.layers.0: page size is not divisible by the maximum page size and "
        "cannot be padded. Padding is only supported for non-MLA attention layers.",
        "K05",
    ),
    ("RuntimeError: Missing TRTLLM-GEN kernel (decode): numTokensPerPage=128", "K06"),
    ("ValueError: num_speculative_tokens:3 must be divisible by n_predict=2", "C31"),
]


@pytest.mark.parametrize(("said", "check"), MEASURED)
def test_a_measured_error_names_its_check(said: str, check: str) -> None:
    known = explain_log(f"INFO something\n{PREFIX}Traceback (most recent call last):\n{PREFIX}{said}\n")
    assert known is not None
    assert check in known.checks


@pytest.mark.parametrize(
    ("file", "check"),
    [("vocab_parallel_embedding.py", "C19"), ("parameter.py", "T07"), ("models/llama.py", "K02")],
)
def test_a_bare_assertion_is_told_by_where_it_stands(file: str, check: str) -> None:
    log = "\n".join(
        PREFIX + line
        for line in (
            f'  File "/site-packages/vllm/model_executor/{file}", line 515, in weight_loader',
            "    assert loaded_weight.shape[output_dim] == self.org_vocab_size",
            "           ^^^^^^^^^^^^^^^^",
            "AssertionError",
        )
    )
    known = explain_log(log)
    assert known is not None
    assert check in known.checks


@pytest.mark.parametrize(
    "said",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    ],
)
def test_out_of_memory(said: str) -> None:
    error = log_error("ended with exit code 1 while loading", PREFIX + said, Path("/tmp/v.log"))
    assert "ran out of memory while loading" in str(error)
    assert "--max-model-len" in error.hint


def test_the_first_cause_is_told_not_the_last_words() -> None:
    log = "\n".join(
        [
            PREFIX
            + "ValueError: Available memory on node 0 (9.68/11.09 GiB) on startup is less than desired",
            PREFIX
            + "Exception: WorkerProc initialization failed due to an exception in a background process",
            "RuntimeError: Engine core initialization failed. See root cause above.",
        ]
    )
    error = log_error("ended with exit code 1 while loading", log, Path("/tmp/v.log"))
    assert "less memory is free than it was told to claim" in str(error)
    assert "It said: ValueError: Available memory on node 0" in str(error)
    assert error.exit_code == 3


def test_an_unknown_failure_shows_its_own_error_line() -> None:
    log = f"start\n{PREFIX}OddError: nobody knows\nRuntimeError: Engine core initialization failed.\n"
    error = log_error("died while serving, exit code 1", log, Path("/tmp/v.log"))
    assert (
        str(error) == "vllm: died while serving, exit code 1. Its last words were:\n  OddError: nobody knows"
    )
    assert error.hint == "Its whole log is /tmp/v.log."


def test_a_silent_failure_shows_the_last_lines() -> None:
    log = "\n".join(f"line {i}" for i in range(100))
    assert str(log_error("ended", log, Path("l"))).endswith("line 98\n  line 99")
    assert "(nothing)" in str(log_error("ended", "", Path("l")))


def test_progress_is_the_last_information() -> None:
    log = "(A pid=1) INFO 11-30 18:07:39 [model.py:733] Loading weights\nnoise\n"
    assert last_progress(log) == "Loading weights"
    assert last_progress("noise") == ""


def test_every_explanation_is_a_sentence_with_a_fix() -> None:
    for known in KNOWN_FAILURES:
        re.compile(known.pattern)
        assert known.fix.endswith(".")
        assert not known.meaning.endswith(".")
