"""What both protocol servers share: HTTP/1.1 over a socket, routes, faults to inject, a log of requests.

A hub is reached as `localhost` and its blob storage as `127.0.0.1`: clients must see two hosts, since
what they may send to one (credentials) they may not send to the other.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

BLOCK_BYTES = 1 << 20


@dataclass
class Request:
    """One request, its body not yet read."""

    method: str
    path: str  # unquoted
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    host: str
    blocks: Callable[[], Iterator[bytes]]

    def body(self) -> bytes:
        return b"".join(self.blocks())

    def json(self) -> Any:
        return json.loads(self.body() or b"null")


@dataclass
class Reply:
    """What goes back; a dict or list becomes JSON, a Path is streamed."""

    status: int = 200
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Fault:
    """What goes wrong with the requests that match, in place of or after the right answer.

    Attributes:
        method: of the request.
        path: regular expression that its path must contain.
        status: answer with this instead of doing anything.
        body: of that answer.
        headers: of that answer.
        drop: "before" closes the connection without doing anything, "after" does the work and then
            closes it without an answer.
        times: how often; -1 means for ever.
        after: do the work, then answer with `status` all the same.
        act: called before the request is served (a concurrent writer, a kill).
    """

    method: str
    path: str
    status: int = 0
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)
    drop: str = ""
    times: int = 1
    after: bool = False
    act: Callable[[], None] | None = None


@dataclass(frozen=True)
class Seen:
    """A request that came in, for assertions."""

    method: str
    path: str
    host: str
    headers: dict[str, str]


Route = tuple[str, re.Pattern[str], Callable[..., Reply]]


class HubServer:
    """A threaded server; subclasses list their routes.

    Args:
        root: folder for the blobs.
    """

    def __init__(self, root: Path) -> None:
        self.blobs = Blobs(root / "blobs")
        self.faults: list[Fault] = []
        self.log: list[Seen] = []
        self.lock = threading.RLock()
        self.routes: list[Route] = [
            (method, re.compile(pattern + "$"), handler) for method, pattern, handler in self.table()
        ]
        self._http = _Server(("127.0.0.1", 0), self)
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def table(self) -> list[tuple[str, str, Callable[..., Reply]]]:
        raise NotImplementedError

    @property
    def endpoint(self) -> str:
        return f"http://localhost:{self.port}"

    @property
    def storage(self) -> str:
        return f"http://127.0.0.1:{self.port}/storage"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def serve(self, request: Request) -> Reply | None:
        """The answer, or None to close the connection without one."""
        fault = self._fault(request)
        if fault and fault.act:
            fault.act()
        if fault and fault.status and not fault.after:
            return Reply(fault.status, fault.body, fault.headers)
        if fault and fault.drop == "before":
            return None
        reply = self._route(request)
        if fault and fault.after:
            return Reply(fault.status, fault.body, fault.headers)
        return None if fault and fault.drop == "after" else reply

    def count(self, method: str, path: str) -> int:
        """How many requests of a kind came in."""
        return sum(1 for seen in self.log if seen.method == method and re.search(path, seen.path))

    def _fault(self, request: Request) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == request.method and re.search(fault.path, request.path):
                    fault.times -= 1
                    return fault
        return None

    def _route(self, request: Request) -> Reply:
        for method, pattern, handler in self.routes:
            match = pattern.match(request.path)
            if match and method == request.method:
                return handler(request, **match.groupdict())
        return Reply(404, {"error": f"no route {request.method} {request.path}"})


class Blobs:
    """Content by sha256, on disk so that gigabytes fit.

    Attributes:
        forget_above: of larger blobs only the sha256 is kept; None keeps everything.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.forget_above: int | None = None
        root.mkdir(parents=True)

    def path(self, sha256: str) -> Path:
        return self.root / sha256

    def has(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    def put(self, blocks: Iterator[bytes]) -> tuple[str, int]:
        """Store a stream; returns its sha256 and size."""
        digest, size = hashlib.sha256(), 0
        temporary = self.root / f"incoming-{threading.get_ident()}"
        with temporary.open("wb") as file:
            for block in blocks:
                digest.update(block)
                size += len(block)
                if self.forget_above is None or size <= self.forget_above:
                    file.write(block)
        temporary.rename(self.path(digest.hexdigest()))
        return digest.hexdigest(), size


@dataclass(frozen=True)
class StoredFile:
    """A file of a commit."""

    sha256: str
    size: int
    lfs: bool


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], hub: HubServer) -> None:
        self.hub = hub
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self._drained = False
        request = Request(
            method=self.command,
            path=unquote(url.path),
            query={key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()},
            headers={name.lower(): value for name, value in self.headers.items()},
            host=self.headers.get("Host", "").rsplit(":", 1)[0],
            blocks=self._blocks,
        )
        hub = self.server.hub
        with hub.lock:
            hub.log.append(Seen(request.method, request.path, request.host, request.headers))
        reply = hub.serve(request)
        if reply is None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        for _ in self._blocks():  # what the route did not read; the connection is kept
            pass
        self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        body, headers = reply.body, dict(reply.headers)
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
            headers.setdefault("Content-Type", "application/json")
        elif isinstance(body, str):
            body = body.encode()
        size = body.stat().st_size if isinstance(body, Path) else len(body)
        start, end = 0, size
        asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and reply.status == 200:
            start, end = int(asked[1]), min(int(asked[2] or size - 1) + 1, size)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        self.send_response(206 if asked and reply.status == 200 else reply.status)
        headers.setdefault("Content-Length", str(end - start))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(body, bytes):
            self.wfile.write(body[start:end])
            return
        with body.open("rb") as file:
            file.seek(start)
            while start < end:
                block = file.read(min(BLOCK_BYTES, end - start))
                self.wfile.write(block)
                start += len(block)

    def _blocks(self) -> Iterator[bytes]:
        if self._drained:
            return
        self._drained = True
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            block = self.rfile.read(min(BLOCK_BYTES, left))
            if not block:
                raise ConnectionError("the client went away")
            left -= len(block)
            yield block

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815
