"""ModelScope, through modelscope_hub's lower functions: batch, PUT, one commit, and the listing as proof.

Not upload_folder: it creates a missing repository as public under Apache-2.0, writes a cache file beside
the weights, commits the other files when one blob failed, and takes "nothing done" for success
(modelscope_hub 0.5.1, measured). The hub has no parent lock; another writer is seen by comparing listings.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
from collections.abc import Callable
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from eagle3pack.errors import (
    ConflictError,
    Eagle3PackError,
    PermissionDenied,
    RefusedError,
    UsageError,
)
from eagle3pack.publish.hub import (
    Commit,
    HubKind,
    PublishedFile,
    RemoteFile,
    RemoteState,
    UnsettledError,
    redact,
    require_safe_endpoint,
    translated,
)

KNOWN_VERSIONS = ("0.5.",)
# Functions of the client's lower layer, which is not its public face, with the arguments given to them.
USED_FUNCTIONS = {
    "get_repo_info": ("repo_id", "repo_type"),
    "list_repo_files": ("repo_id", "repo_type", "revision"),
    "validate_blobs": ("repo_id", "repo_type", "objects"),
    "upload_blob": ("upload_url", "data", "size", "timeout"),
    "create_commit": ("repo_id", "repo_type", "operations", "commit_message", "revision"),
    "create_tag": ("repo_id", "repo_type", "tag", "revision"),
    "list_revisions_detail": ("repo_id", "repo_type"),
    "download_stream": ("repo_id", "repo_type", "file_path", "revision"),
}
VISIBILITY = {"private": 1, "public": 5}
INLINE_LIMIT_BYTES = 65_536  # modelscope_hub keeps larger files as blobs
# Files that the hub reads itself: as a blob's pointer they would show empty.
ALWAYS_INLINE = frozenset({"README.md", "config.json", "configuration.json", ".gitattributes"})
BLOB_SUFFIXES = (".safetensors", ".bin", ".pt", ".model")
TIMEOUT_S = (30, 300)  # to connect, and for a silent socket
AGAIN = "Run the same command again: what is there is not sent twice."
LOGIN_HINT = "Run `ms login`, or set MODELSCOPE_API_TOKEN."


class ModelScope:
    """A model repository on ModelScope or a server that speaks its protocol."""

    kind: HubKind = "ms"
    branch = "master"
    proposes = False

    def __init__(self, repo_id: str) -> None:
        self.repo_id = repo_id
        self._api: Any = _client()
        self.endpoint = require_safe_endpoint(str(self._api.legacy.endpoint))

    @property
    def url(self) -> str:
        """Where people see the repository."""
        return f"{self.endpoint}/models/{self.repo_id}"

    def commit_url(self, commit: str) -> str:
        """Where people see a commit: the hub shows the files of a branch, not of a commit."""
        return f"{self.url}/files"

    def require_login(self) -> str:
        """The name of the account that publishes."""
        if not self._api.legacy.token:
            raise PermissionDenied("not logged in to ModelScope", where=self.url, hint=LOGIN_HINT)
        with translated(explain, "asking who is logged in"):
            return str(self._api.whoami().username)

    def read_state(self, revision: str | None = None) -> RemoteState | None:
        """The repository at the head of `master` or at a revision; None where that does not exist."""
        from modelscope_hub.errors import NotExistError

        with translated(explain, f"reading {self.repo_id}"):
            try:
                info = self._api.legacy.get_repo_info(self.repo_id, "model")
                entries = self._api.legacy.list_repo_files(
                    self.repo_id, "model", revision=revision or self.branch
                )
            except NotExistError:
                return None
        files = {
            str(entry["Path"]): RemoteFile(int(entry["Size"]), str(entry["Sha256"]))
            for entry in entries
            if entry.get("Type") != "tree"
        }
        listing = sorted((path, file.size, file.sha256) for path, file in files.items())
        head = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
        return RemoteState(head, int(info.get("Visibility") or 0) == VISIBILITY["public"], files)

    def read_text(self, path: str, head: str) -> str:
        """A small text file of the repository."""
        with translated(explain, f"reading {path}"):
            response = self._api.legacy.download_stream(self.repo_id, "model", path, revision=self.branch)
            return bytes(response.content).decode("utf-8", errors="replace")

    def create(self, *, public: bool, license_id: str) -> None:
        """Create the repository with its final visibility: the hub cannot change that through its API."""
        from modelscope_hub.errors import AlreadyExistsError

        with translated(explain, f"creating {self.repo_id}"):
            try:
                self._api.create_repo(
                    self.repo_id,
                    "model",
                    visibility=VISIBILITY["public" if public else "private"],
                    license=license_id,
                )
            except AlreadyExistsError:
                return

    def card_problems(self, card: str) -> list[str]:
        """Nothing: the hub has no validator."""
        return []

    def upload_blobs(self, files: list[PublishedFile], on_bytes: Callable[[int], None]) -> None:
        """Send what the hub's batch answer asks for, credentials only to the hub's own hosts."""
        blobs = {file.sha256: file for file in files if _is_blob(file)}
        if not blobs:
            return
        wanted = [{"oid": file.sha256, "size": file.size} for file in blobs.values()]
        with translated(explain, "uploading"):
            addresses = self._api.legacy.validate_blobs(self.repo_id, "model", wanted)
        for sha256, file in blobs.items():
            # A blob that the answer leaves out counts as stored; the listing after the commit proves it.
            if address := addresses.get(sha256):
                self._send(file, address, on_bytes)

    def commit(
        self,
        files: list[PublishedFile],
        deletes: list[str],
        message: str,
        parent: RemoteState,
    ) -> Commit:
        """One commit; another writer's is looked for just before and just after it.

        Raises:
            ConflictError: the listing is no longer `parent`'s, or holds afterwards what we did not send.
        """
        before = self.read_state()
        if before is None or before.head != parent.head:
            raise ConflictError(
                "someone else changed the repository meanwhile", where=self.url, hint="Look, then run again."
            )
        actions = [_action(file) for file in files]
        actions += [{"action": "delete", "path": path, "type": "normal", "size": 0} for path in deletes]
        with translated(explain, "committing"):
            answer = self._api.legacy.create_commit(
                self.repo_id, "model", actions, message, revision=self.branch
            )
        after = self.read_state()
        ours = {file.path for file in files} | set(deletes)
        if after is None or _others(before, ours) != _others(after, ours):
            raise ConflictError(
                "someone else committed at the same moment; both commits stand",
                where=self.url,
                hint="Look at the repository's files, then run again.",
            )
        told = answer.get("oid") or answer.get("id") if isinstance(answer, dict) else None
        return Commit(self.branch, self.commit_url(self.branch), str(told or ""))

    def proposals(self) -> list[Commit]:
        """None: the hub has none that a client can open."""
        return []

    def tags(self) -> set[str]:
        """Names of the repository's tags."""
        with translated(explain, "listing tags"):
            _, tags = self._api.legacy.list_revisions_detail(self.repo_id, "model")
        return {str(tag.get("Revision") or tag.get("Name")) for tag in tags}

    def create_tag(self, tag: str, commit: str) -> None:
        """Tag a revision."""
        with translated(explain, f"tagging {tag}"):
            self._api.legacy.create_tag(self.repo_id, "model", tag, commit)

    def make_public(self) -> None:
        """Not possible through the API.

        Raises:
            RefusedError: always.
        """
        raise RefusedError(
            "ModelScope does not let a program make a private model public",
            where=self.url,
            hint="Change the visibility on the repository's settings page, then run again.",
        )

    def _send(self, file: PublishedFile, address: str, on_bytes: Callable[[int], None]) -> None:
        """PUT one blob; an address that does not work is asked for anew."""
        import requests

        require_safe_endpoint(address)
        try:
            with translated(explain, f"uploading {file.path}"), file.local.open("rb") as stream:
                body = _Watched(stream, file.size, on_bytes)
                if urlsplit(address).hostname in _own_hosts(self.endpoint):
                    self._api.legacy.upload_blob(address, body, file.size, timeout=TIMEOUT_S)
                    return
                # upload_blob would send token and cookie to whatever host the answer names.
                headers = {"Content-Length": str(file.size)}
                response = requests.put(address, data=body, headers=headers, timeout=TIMEOUT_S)
                status = response.status_code
        except PermissionDenied as error:  # the login was checked: the address has expired
            raise UnsettledError(error.problem, hint=AGAIN) from error
        if status >= 400:
            raise UnsettledError(
                f"uploading {file.path} failed: the storage answered HTTP {status}", hint=AGAIN
            )


class _Watched:
    """A file that tells how much of it was read, for a client that streams it."""

    def __init__(self, stream: BinaryIO, size: int, on_bytes: Callable[[int], None]) -> None:
        self._stream = stream
        self._size = size
        self._on_bytes = on_bytes

    def __len__(self) -> int:
        return self._size

    def read(self, count: int = -1) -> bytes:
        block = self._stream.read(max(count, 1 << 20) if count >= 0 else count)
        self._on_bytes(len(block))
        return block


def _client() -> Any:
    """The client, if it is one whose functions we know."""
    try:
        import modelscope_hub
        from modelscope_hub import HubApi
    except ImportError as error:
        raise UsageError(
            f"publishing to ModelScope needs modelscope-hub ({error})",
            hint="pip install 'modelscope-hub>=0.5,<0.6'",
        ) from None
    version = str(modelscope_hub.__version__)
    lacks = _missing_functions()
    if lacks or not version.startswith(KNOWN_VERSIONS):
        raise UsageError(
            f"modelscope-hub {version} is a version whose functions are not known here"
            + (f"; it lacks {', '.join(lacks)}" if lacks else ""),
            hint="pip install 'modelscope-hub>=0.5,<0.6'",
        )
    with translated(explain, "starting the client"):
        return HubApi()


def _missing_functions() -> list[str]:
    """Functions of the client that are not there, or do not take the arguments we give."""
    from modelscope_hub import _legacy_api

    client = getattr(_legacy_api, "LegacyClient", None)
    missing = []
    for name, arguments in USED_FUNCTIONS.items():
        function = getattr(client, name, None)
        if function is None or not set(arguments) <= set(inspect.signature(function).parameters):
            missing.append(name)
    return missing


def _is_blob(file: PublishedFile) -> bool:
    if file.path in ALWAYS_INLINE:
        return False
    return file.size > INLINE_LIMIT_BYTES or file.path.endswith(BLOB_SUFFIXES)


def _action(file: PublishedFile) -> dict[str, Any]:
    action: dict[str, Any] = {"action": "create", "path": file.path, "size": file.size}
    if _is_blob(file):
        return action | {"type": "lfs", "sha256": file.sha256, "content": "", "encoding": ""}
    content = base64.b64encode(file.local.read_bytes()).decode("ascii")
    return action | {"type": "normal", "sha256": "", "content": content, "encoding": "base64"}


def _others(state: RemoteState, ours: set[str]) -> dict[str, RemoteFile]:
    return {path: file for path, file in state.files.items() if path not in ours}


def _own_hosts(endpoint: str) -> set[str]:
    """Hosts that belong to the hub and may see its credentials."""
    host = urlsplit(endpoint).hostname or ""
    base = host.removeprefix("www.")
    return {host, base, f"lfs.{base}", f"pre-lfs.{base}"}


def explain(error: BaseException, doing: str) -> Eagle3PackError | None:
    """Our error for an exception of modelscope_hub or its transport; None for anything else."""
    names = {kind.__name__ for kind in type(error).__mro__}
    modules = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    text = redact(str(getattr(error, "message", None) or error)).strip().splitlines()
    status = getattr(error, "status_code", None)
    reason = text[0] if text else type(error).__name__
    said = f"{doing} failed: {reason}" + (f" (HTTP {status})" if status else "")
    if "HubError" not in names:
        if modules & {"requests", "urllib3"}:
            return UnsettledError(said, hint=AGAIN)
        return None
    if names & {"AuthenticationError", "PermissionDeniedError"}:
        return PermissionDenied(said, hint=LOGIN_HINT)
    if "NotExistError" in names:
        return PermissionDenied(said, hint="Is the name right, and may this account see it?")
    if "NetworkError" in names and "RequestTimeoutError" not in names:
        return UnsettledError(f"{doing} failed: no connection to the hub", hint=AGAIN)
    if getattr(error, "retryable", False):
        return UnsettledError(said, hint=AGAIN, retry_after_s=float(getattr(error, "retry_after", 0) or 0))
    return RefusedError(said)
