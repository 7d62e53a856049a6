"""`convert --endpoint`: a server's texts and states give what the target in this process gives."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3pack.convert import calibrate
from eagle3pack.convert.calibration_sources import server as module
from eagle3pack.convert.merging.calibration import Calibration
from eagle3pack.documents import schema_problems
from eagle3pack.engine.chat import load_chat
from eagle3pack.engine.generation import Settings
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.target import load_target
from eagle3pack.errors import (
    Eagle3PackError,
    InputError,
    RefusedError,
    TransportError,
    UsageError,
)
from tests.cli import Cli
from tests.convert.calibration_sources.test_files import MAX_TOKENS, assert_same, calibrated
from tests.convert.merging.test_capture import write_target
from tests.convert.test_calibrate import write_tokenizer
from tests.convert.test_command import convert
from tests.engine.test_replay import states_of
from tests.tiny import write_draft

TURNS = [[f"w{5 + i} w17 w{40 + i}", "w8 w9"][: 1 + i % 2] for i in range(11)]


class Fake:
    """A vLLM with a real, tiny target behind it, and the connector's files.

    Attributes:
        faults: what it does wrong.
        model: what it calls its model.
        folder: where it writes states.
        asked: bodies of all requests.
        page: what it answers to every GET, where it is no vLLM.
        spoken: set once a mute server may give up.
    """

    def __init__(self, target: Path, folder: Path) -> None:
        self.faults: set[str] = set()
        self.model = "org/target"
        self.folder = folder
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.unfinished: list[IO[str]] = []
        self.page: bytes | None = None
        self.spoken = threading.Event()
        self._target = load_target(target)
        self._chat = load_chat(target)
        self._lock = threading.Lock()
        self._target.capture((2, 4, 5, 8))

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.asked.append(body)
            if "no template" in self.faults and "messages" in body:
                return 400, {"error": {"message": "the model has no chat template"}}
            if "refuses" in self.faults:
                return 400, {"error": {"message": "maximum context length is 8 tokens"}}
            prompt = self._prompt(body)
            settings = Settings(max_tokens=body["max_tokens"], stop_ids=self._chat.stop_ids)
            (output,) = generate(self._target, [prompt], settings).outputs
            choice: dict[str, Any] = {"index": 0, "token_ids": list(output)}
            text = self._chat.text(output)
            choice |= {"message": {"content": text}} if "messages" in body else {"text": text}
            given = {"choices": [choice], "prompt_token_ids": prompt}
            if "no tokens" in self.faults:
                del choice["token_ids"]
            if "no states" not in self.faults:
                given["kv_transfer_params"] = {"hidden_states_path": str(self._write(prompt, output, body))}
            return 200, given

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            said = [message["content"] for message in body["messages"]]
            return self._chat.prompt(said[::2], said[1::2])
        if isinstance(body["prompt"], str):
            return self._chat.prompt([body["prompt"]])
        return list(body["prompt"])

    def _write(self, prompt: list[int], output: tuple[int, ...], body: dict[str, Any]) -> Path:
        ids = torch.tensor([*prompt, *output])[:-1]
        if not body["kv_transfer_params"].get("include_output_tokens") or "old" in self.faults:
            ids = torch.tensor(prompt)
        states = states_of(self._target, ids).unflatten(1, (4, 64))
        if "layers" in self.faults:
            states = states[:, :2]
        if "nan" in self.faults:
            states = states * float("nan")
        path = self.folder / f"chatcmpl-{len(self.asked)}.safetensors"
        if "elsewhere" in self.faults:
            return self.folder / "elsewhere" / path.name
        lock = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if "never written" in self.faults:
            self.unfinished.append(lock)
            return path

        def finish() -> None:
            save_file({"hidden_states": states.contiguous(), "token_ids": ids}, path)
            lock.close()

        threading.Timer(0.05, finish).start()  # after the response, as the real one
        return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tokenizer(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft") / "mha", dtype="F32")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    path.write_text("\n".join(json.dumps({"turns": turns}) for turns in TURNS))
    return path


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "MAX_TOKENS", MAX_TOKENS)
    monkeypatch.setattr(module, "UNSEEN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(module, "FILE_TIMEOUT_S", 1.0)


@pytest.fixture(scope="module")
def running(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fake, str]]:
    fake = Fake(target, tmp_path_factory.mktemp("states"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Be quiet."""

        def reply(self, status: int, body: dict[str, Any]) -> None:
            self.send(status, json.dumps(body).encode(), "application/json")

        def send(self, status: int, data: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            fake.headers.append(self.headers["Authorization"])
            if "unauthorised" in fake.faults:
                self.reply(401, {"error": "Unauthorized"})
            elif "mute" in fake.faults:
                fake.spoken.wait(30)
            elif fake.page is not None:
                self.send(200, fake.page, "text/html" if b"html" in fake.page else "application/json")
            elif self.path == "/v1/models":
                self.reply(200, {"data": [{"id": fake.model}]})
            else:
                self.reply(200, {"version": "0.32.0"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(*fake.answer(body))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield fake, f"http://127.0.0.1:{server.server_address[1]}/v1/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def fake(running: tuple[Fake, str]) -> Iterator[Fake]:
    fake, _ = running
    fake.asked.clear()
    yield fake
    fake.spoken.set()
    fake.faults.clear()
    fake.page = None
    fake.model = "org/target"
    for lock in fake.unfinished:
        lock.close()
    for path in fake.folder.iterdir():
        path.unlink()


@pytest.fixture
def url(running: tuple[Fake, str]) -> str:
    return running[1]


@pytest.fixture(scope="module")
def in_process(
    tmp_path_factory: pytest.TempPathFactory, target: Path, source: Path, prompts: Path
) -> Calibration:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "MAX_TOKENS", MAX_TOKENS)
        folder = tmp_path_factory.mktemp("in process")
        return calibrated(source, folder, target=str(target), calibrate_with=str(prompts))


def test_a_server_gives_what_the_target_in_this_process_gives(
    tmp_path: Path, source: Path, prompts: Path, fake: Fake, url: str, in_process: Calibration
) -> None:
    found = calibrated(source, tmp_path, calibrate_with=str(prompts), endpoint=url)
    assert_same(found, in_process)
    assert schema_problems(found.document, "calibration") == []
    assert found.document["source"] == {"kind": "server", "engine": "vllm 0.32.0"}
    assert found.document["target"] == {"id": "org/target"}
    assert found.document["prompts"] == in_process.document["prompts"]
    assert all(body["temperature"] == 0 and body["model"] == "org/target" for body in fake.asked)
    assert list(fake.folder.iterdir()) == []  # what was read is gone


def test_prompts_of_tokens_and_targets_without_a_template(
    tmp_path: Path, source: Path, fake: Fake, url: str
) -> None:
    fake.faults.add("no template")
    fake.model = "/models/mine"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"token_ids": [5, 6]}\n{"turns": ["w1 w2", "w3"]}\n{"prompt": "w4"}')
    found = calibrated(source, tmp_path, calibrate_with=str(prompts), endpoint=url)
    assert found.document["target"] == {"id": "mine"}  # a record holds no paths
    asked = [body["prompt"] for body in fake.asked if "prompt" in body]
    assert asked[:2] == [[5, 6], [5, 6]] and {"w1 w2", "w4"} <= set(asked[2:])
    assert asked[-1].startswith("w1 w2\n\n") and asked[-1].endswith("\n\nw3")


def test_the_key_goes_along(
    tmp_path: Path, source: Path, prompts: Path, fake: Fake, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k-1")
    fake.faults.add("unauthorised")
    with pytest.raises(RefusedError, match="HTTP 401") as raised:
        calibrated(source, tmp_path, calibrate_with=str(prompts), endpoint=url)
    assert fake.headers[-1] == "Bearer k-1" and "VLLM_API_KEY" in raised.value.hint


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("no states", UsageError, "the server gives no hidden states"),
        ("refuses", RefusedError, "maximum context length is 8 tokens"),
        ("no tokens", RefusedError, "something else than a completion with token ids"),
        ("elsewhere", UsageError, "is not on this machine"),
        ("never written", TransportError, "was not complete within 1 s"),
        ("old", InputError, "which are not the"),
        ("layers", InputError, "holds 128 numbers a token; the draft reads 3 states of 64"),
        ("nan", InputError, "NaN or infinity"),
    ],
)
def test_what_goes_wrong_is_one_clear_error_before_the_draft_is_loaded(
    tmp_path: Path,
    source: Path,
    prompts: Path,
    fake: Fake,
    url: str,
    fault: str,
    kind: type[Eagle3PackError],
    message: str,
) -> None:
    fake.faults.add(fault)
    with pytest.raises(kind, match=message):
        calibrated(source, tmp_path, calibrate_with=str(prompts), endpoint=url)
    assert len(fake.asked) == 1


def test_a_server_that_gives_no_states_is_told_its_command_line(
    cli: Cli, tmp_path: Path, source: Path, prompts: Path, fake: Fake, url: str
) -> None:
    fake.faults.add("no states")
    options = ("--num-kv-heads", 2, "--method", "als", "--calibrate-with", prompts, "--endpoint", url)
    result = cli("convert", source, tmp_path / "gqa", *options)
    assert result.code == 2 and "Traceback" not in result.err
    assert "vllm serve TARGET --speculative-config '" in result.err
    for text in ("--speculative-config '", "--kv-transfer-config '"):
        json.loads(result.err.split(text)[1].split("'")[0])
    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 5]' in result.err


def test_a_server_that_does_not_answer_is_given_up_at_once_though_an_answer_may_take_long(
    tmp_path: Path, source: Path, prompts: Path, fake: Fake, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.2)
    fake.faults.add("mute")
    fake.spoken.clear()
    begin = time.monotonic()
    with pytest.raises(TransportError, match="/v1/models gave no answer in time") as raised:
        calibrated(source, tmp_path, calibrate_with=str(prompts), endpoint=url)
    assert time.monotonic() - begin < 10 and "up" in raised.value.hint
    assert module.REQUEST_TIMEOUT_S >= 600


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (b"{}", "HTTP 200: {}"),
        (b"", "HTTP 200: nothing"),
        (b"<!doctype html><html><body>It works!</body></html>", "HTTP 200: a web page"),
        (b"[" * 100_000, "HTTP 200: [[["),
    ],
)
def test_what_is_no_such_server_is_told_so(
    tmp_path: Path, source: Path, prompts: Path, fake: Fake, url: str, page: bytes, said: str
) -> None:
    fake.page = page
    with pytest.raises(RefusedError) as raised:
        calibrated(source, tmp_path, calibrate_with=str(prompts), endpoint=url)
    assert raised.value.problem.startswith(f"/v1/models answered {said}")
    assert len(raised.value.problem) < 400 and "Is this vLLM" in raised.value.hint


def test_nobody_there(tmp_path: Path, source: Path, prompts: Path) -> None:
    with pytest.raises(TransportError, match="does not answer"):
        calibrated(source, tmp_path, calibrate_with=str(prompts), endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "http://h:1"}, "--endpoint: a server answers prompts"),
        ({"endpoint": "h:1", "calibrate_with": "shipped"}, "must be a URL"),
        ({"endpoint": "http://h:99999999", "calibrate_with": "shipped"}, "must be a URL"),
        ({"endpoint": "http://h:0", "calibrate_with": "shipped"}, "must be a URL"),
        ({"endpoint": "http://[::1", "calibrate_with": "shipped"}, "must be a URL"),
        ({"endpoint": "http://u:secret@h:1", "calibrate_with": "shipped"}, "must not hold a password"),
        ({"calibrate_with": "shipped"}, "needs the target's weights, or a server that has them"),
    ],
)
def test_contradictions_are_refused_before_anything_is_read(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        convert(tmp_path / "no draft", tmp_path / "gqa", num_kv_heads=2, method="als", **options)
    assert "secret" not in str(raised.value)
