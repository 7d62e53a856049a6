"""A `vllm` that behaves like the real one as far as HTTP goes, or badly in one way, without a model.

    python fake_vllm.py serve MODEL --port P --served-model-name NAME [--speculative-config JSON] ...

What it does wrong is told by the environment variable FAKE_VLLM: words separated by commas.
FAKE_VLLM_STATE is a folder in which it leaves what the tests look at.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FAULTS = frozenset(filter(None, os.environ.get("FAKE_VLLM", "").split(",")))
STATE = Path(os.environ.get("FAKE_VLLM_STATE", "."))
PREFIX = "(EngineCore pid=77) ERROR 11-30 18:08:06 [core.py:1510] "


class Fake:
    """The state behind the HTTP handlers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.name = arguments.served_model_name
        self.model = arguments.model
        spec = json.loads(arguments.speculative_config) if arguments.speculative_config else {}
        self.speculative_tokens = 0 if "no_speculation" in FAULTS else spec.get("num_speculative_tokens", 0)
        self.per_request = arguments.per_request_spec_decode_metrics == "summary"
        self.max_model_len = int(arguments.max_model_len or 2048)
        self.lock = threading.Lock()
        self.requests = 0
        self.running = self.most_running = 0
        self.histogram = [0] * (self.speculative_tokens + 1)
        self.generated = 0

    def metrics(self) -> str:
        """As prometheus_client writes it."""
        if not self.speculative_tokens:
            return f'vllm:generation_tokens_total{{engine="0"}} {self.generated}\n'
        labels = f'engine="0",model_name="{self.name}"'
        drafts = sum(self.histogram)
        accepted = sum(count * times for count, times in enumerate(self.histogram))
        lines = [
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(drafts)}",
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.79e+09",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(drafts * self.speculative_tokens)}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(accepted)}",
            f"vllm:generation_tokens_total{{{labels}}} {float(self.generated)}",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} '
            f"{float(sum(self.histogram[i + 1 :]))}"
            for i in range(self.speculative_tokens)
        ]
        return "\n".join(lines) + "\n"

    def answer(self, body: dict[str, Any], chat: bool) -> dict[str, Any]:
        """Token i of an answer is 100 + i; every draft has two tokens accepted, or none."""
        prompt = json.dumps(body.get("messages") or body.get("prompt"))
        prompt_ids = [len(prompt) % 90, *range(3)]
        stop = body.get("stop_token_ids") or []
        count = 1 if 100 in stop else body["max_tokens"]
        tokens = [100 + i for i in range(count)]
        if "diverges" in FAULTS and self.speculative_tokens and len(tokens) > 5:
            tokens[5] = 7
        text = "" if 100 in stop else " ".join(f"w{token}" for token in tokens)
        accepted = 0 if "nothing_accepted" in FAULTS else min(2, self.speculative_tokens)
        histogram = [0] * (self.speculative_tokens + 1)
        long_prompt = isinstance(body.get("prompt"), list) and len(body["prompt"]) > 512
        if self.speculative_tokens and not (long_prompt and "short_draft" in FAULTS):
            histogram[accepted] = (len(tokens) - 1) // (accepted + 1)
        with self.lock:
            for i, times in enumerate(histogram):
                self.histogram[i] += times * (2 if "others_use_it" in FAULTS else 1)
            self.generated += len(tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": tokens}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        result: dict[str, Any] = {
            "choices": [choice],
            "prompt_token_ids": prompt_ids,
            "usage": {"completion_tokens": len(tokens), "prompt_tokens": 4},
        }
        if "old" in FAULTS:
            del choice["token_ids"], result["prompt_token_ids"]
        if self.per_request and self.speculative_tokens:
            drafts = sum(histogram)
            result["metrics"] = {
                "speculative_decoding": {
                    "acceptance_histogram": histogram,
                    "num_draft_tokens": drafts * self.speculative_tokens,
                }
            }
        return result


def handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    """The HTTP side."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Be quiet."""

        def reply(self, status: int, body: str, kind: str = "application/json") -> None:
            data = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(200, "")
            elif self.path == "/version":
                self.reply(200, json.dumps({"version": "0.32.0"}))
            elif self.path == "/v1/models":
                model = {"id": fake.name, "root": fake.model, "max_model_len": fake.max_model_len}
                self.reply(200, json.dumps({"data": [model]}))
            elif self.path == "/metrics" and "no_metrics" not in FAULTS:
                self.reply(200, fake.metrics(), "text/plain")
            else:
                self.reply(404, json.dumps({"error": {"message": "Not Found"}}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                fake.requests += 1
                number = fake.requests
                fake.running += 1
                fake.most_running = max(fake.running, fake.most_running)
            if STATE.is_dir():
                (STATE / "most_running").write_text(str(fake.most_running))
            if number > 3 and "dies" in FAULTS:
                print(PREFIX + "IndexError: index 49154 is out of bounds for dimension 0", flush=True)
                os._exit(1)
            if number > 3 and "hangs" in FAULTS:
                (STATE / "hanging").touch()
                time.sleep(1000)
            time.sleep(0.01)
            if body["model"] != fake.name or (number > 3 and "errors" in FAULTS):
                self.reply(500, json.dumps({"error": {"message": "EngineCore encountered an issue"}}))
            elif "no_chat_template" in FAULTS and "chat" in self.path:
                message = "As of transformers v4.44, default chat template is no longer allowed"
                self.reply(400, json.dumps({"error": {"message": message}}))
            elif number > 3 and "nonsense" in FAULTS:
                self.reply(200, "<html>a proxy</html>")
            else:
                self.reply(200, json.dumps(fake.answer(body, "chat" in self.path)))
            with fake.lock:
                fake.running -= 1

    return Handler


def load(arguments: argparse.Namespace) -> None:
    """Everything that may go wrong before it serves."""
    if "port_taken" in FAULTS:
        attempts = STATE / "attempts"
        attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
        if "always" in FAULTS or len(attempts.read_text()) == 1:
            sys.exit(f"OSError: [Errno 98] Address already in use: ('127.0.0.1', {arguments.port})")
    if "package" in FAULTS:
        sys.exit("importlib.metadata.PackageNotFoundError: No package metadata was found for vllm")
    if "out_of_memory" in FAULTS:
        print(PREFIX + "Traceback (most recent call last):")
        print(PREFIX + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.")
        sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
    if "wrong_target" in FAULTS:
        sys.exit(PREFIX + "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x1728 and 3072x1024)")
    if "no_baseline" in FAULTS and not arguments.speculative_config:
        sys.exit("RuntimeError: only with a draft")
    if "riddle" in FAULTS:
        sys.exit(PREFIX + "FrobnicationError: the frob is off")
    if "never_ready" in FAULTS:
        print("(APIServer pid=1) INFO 11-30 18:07:39 [model.py:733] Loading weights took long", flush=True)
        time.sleep(1000)


def main() -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    for option in ("--host", "--port", "--served-model-name", "--speculative-config", "--max-model-len"):
        parser.add_argument(option)
    parser.add_argument("--per-request-spec-decode-metrics", default="none")
    arguments, others = parser.parse_known_args()
    print("fake vllm", others, flush=True)
    (STATE / "pid").write_text(str(os.getpid()))
    # Two workers: one that ignores requests to end, one in a session of its own.
    stubborn = ["sh", "-c", "trap '' TERM; exec sleep 1000"]
    workers = [subprocess.Popen(stubborn), subprocess.Popen(stubborn, start_new_session=True)]
    (STATE / "workers").write_text(" ".join(str(worker.pid) for worker in workers))
    load(arguments)
    if "slow_to_end" in FAULTS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = ThreadingHTTPServer((arguments.host, int(arguments.port)), handler(Fake(arguments)))
    server.serve_forever()


if __name__ == "__main__":
    main()
