"""The engine in this process behind the smoke test's protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3pack.documents import schema_problems
from eagle3pack.draft.config import parse_draft_config
from eagle3pack.draft.target import read_target
from eagle3pack.engine.counters import total
from eagle3pack.errors import UsageError
from eagle3pack.verify.smoke.options import SmokeOptions, Subject
from eagle3pack.verify.smoke.protocol import Conversation, Sampling
from eagle3pack.verify.smoke.reference import ReferenceEngine, SharedTarget
from eagle3pack.verify.smoke.run import run_smoke
from tests.tiny import native_config, write_draft
from tests.verify.smoke.support import write_speaking_target


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaking_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def shared(target_folder: Path) -> SharedTarget:
    return SharedTarget(target_folder, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft") / "draft", dtype="F32")


@pytest.fixture
def engine(shared: SharedTarget, draft_folder: Path) -> ReferenceEngine:
    return ReferenceEngine(shared, draft_folder, 3)


TWO_TURNS = Conversation(("w5 w6 w7", "w8 w9"))
TOKENS = Conversation(token_ids=(11, 12, 13))


def test_turns_are_asked_with_the_answers_before_them(engine: ReferenceEngine) -> None:
    facts = engine.start()
    assert (facts.name, facts.tensor_parallel_size, facts.num_speculative_tokens) == ("reference", None, 3)
    assert (facts.device, facts.dtype, facts.max_model_len) == ("cpu", "float32", 512)
    seen: list[int] = []
    answers = engine.generate([TWO_TURNS, TOKENS], Sampling(6), max_concurrency=2, on_answers=seen.append)
    assert [len(answer) for answer in answers] == [2, 1]
    assert seen == [2, 1]  # a batch at once
    first, second = answers[0]
    assert first.prompt_token_ids == (5, 6, 7, 3)
    assert first.token_ids is not None
    assert second.prompt_token_ids == (5, 6, 7, *first.token_ids, 8, 9, 3)
    assert answers[1][0].prompt_token_ids == (11, 12, 13)


def test_counters_add_up_over_calls(engine: ReferenceEngine) -> None:
    engine.start()
    parts = []
    for conversation in (TWO_TURNS, TOKENS):
        [answer] = engine.generate([conversation], Sampling(6), max_concurrency=1)
        parts += [completion.counters for completion in answer if completion.counters is not None]
    counters = engine.read_counters()
    assert counters == total(parts)
    assert counters is not None
    assert counters.draft_tokens == 3 * counters.drafts > 0


def test_a_baseline_says_the_same_and_counts_nothing(engine: ReferenceEngine, shared: SharedTarget) -> None:
    engine.start()
    baseline = ReferenceEngine(shared, None, 3)
    assert baseline.start().num_speculative_tokens == 0
    conversations = [TWO_TURNS, TOKENS]
    ours = engine.generate(conversations, Sampling(12), max_concurrency=2)
    theirs = baseline.generate(conversations, Sampling(12), max_concurrency=2)
    assert [[one.token_ids for one in answer] for answer in ours] == [
        [one.token_ids for one in answer] for answer in theirs
    ]
    assert baseline.read_counters() is None
    assert theirs[0][0].counters is None


def test_a_stop_token_ends_an_answer_and_is_no_text(engine: ReferenceEngine) -> None:
    engine.start()
    [[plain]] = engine.generate([TOKENS], Sampling(6), max_concurrency=1)
    assert plain.token_ids is not None
    [[stopped]] = engine.generate(
        [TOKENS], Sampling(6, stop_token_ids=(plain.token_ids[0],)), max_concurrency=1
    )
    assert (stopped.text, stopped.output_tokens) == ("", 1)


def test_a_smoke_test_from_one_end_to_the_other(target_folder: Path, draft_folder: Path) -> None:
    subject = Subject(
        draft_folder,
        "./draft",
        None,
        parse_draft_config(native_config(), where="config.json"),
        str(target_folder),
        read_target(target_folder),
    )
    options = SmokeOptions(
        device="cpu", limit=4, max_tokens=8, max_concurrency=2, baseline=True, against=draft_folder
    )
    result = run_smoke(options, subject)
    assert result.run is not None, result.reason
    assert schema_problems(result.run, "report", "smoke_run") == []
    assert result.run["dataset"]["n_prompts"] == 4
    assert result.run["agreement"]["share"] == 1.0
    assert result.run["engine"]["backend"].startswith("torch ")
    assert {probe["status"] for probe in result.run["probes"]} <= {"passed", "not_applicable"}
    assert result.status == ("passed" if result.run["accepted_tokens"] else "failed")


@pytest.mark.parametrize(
    ("dtype", "device", "option"), [("int8", "cpu", "--dtype"), (None, "moon", "--device")]
)
def test_what_cannot_be_computed_in_or_on(
    dtype: str | None, device: str, option: str, target_folder: Path
) -> None:
    with pytest.raises(UsageError, match=option):
        SharedTarget(target_folder, dtype=dtype, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(target_folder: Path) -> None:
    with pytest.raises(UsageError, match="no GPU is available"):
        SharedTarget(target_folder, dtype=None, device="cuda")


def test_the_weights_own_dtype(target_folder: Path) -> None:
    engine = ReferenceEngine(SharedTarget(target_folder, dtype="auto", device="cpu"), None, 3)
    assert engine.start().dtype == "float32"
