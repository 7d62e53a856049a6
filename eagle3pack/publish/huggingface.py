"""Hugging Face: blobs through preupload_lfs_files, then one create_commit with the parent locked.

Not upload_folder: with Xet it makes several commits, follows symbolic links, and repeats a commit whose
answer was lost (huggingface_hub 2.4, measured). Holds for huggingface_hub 1.31 to 2.x, whose transport
errors come from two different libraries (httpx, httpx2).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from eagle3pack.errors import (
    Eagle3PackError,
    PermissionDenied,
    RefusedError,
    UsageError,
)
from eagle3pack.publish.hub import (
    Commit,
    HubKind,
    MovedError,
    PublishedFile,
    RemoteFile,
    RemoteState,
    UnsettledError,
    redact,
    require_safe_endpoint,
    translated,
)

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

# The client waits for ever by default. The hub may take minutes for a commit, never for a silent socket.
TIMEOUT_S = 300.0
ANSWER_S = 30.0  # to connect, and for what the hub only looks up
RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
TRANSPORT_ERRORS = frozenset({"TransportError", "TimeoutException", "RemoteProtocolError", "ConnectError"})
NO_CONNECTION = frozenset({"ConnectError", "ConnectTimeout", "ProxyError"})
XET_HINT = "If the Xet storage cannot be reached from here, set HF_HUB_DISABLE_XET=1 and run again."
AGAIN = "Run the same command again: what is there is not sent twice."
LOGIN_HINT = "Run `hf auth login`, or set HF_TOKEN to a token with write access."


class HuggingFace:
    """A model repository on Hugging Face or a server that speaks its protocol."""

    kind: HubKind = "hf"
    branch = "main"

    def __init__(self, repo_id: str, *, pull_request: bool = False, show_progress: bool = False) -> None:
        from huggingface_hub import HfApi, constants

        self.repo_id = repo_id
        self.endpoint = require_safe_endpoint(os.environ.get("HF_ENDPOINT") or constants.ENDPOINT)
        self.proposes = pull_request
        self._api = HfApi(endpoint=self.endpoint)
        self._operations: dict[str, CommitOperationAdd] = {}
        _http().get_session().timeout = (ANSWER_S, TIMEOUT_S, TIMEOUT_S, TIMEOUT_S)
        if not show_progress and not _http().are_progress_bars_disabled():
            _http().disable_progress_bars()

    @property
    def url(self) -> str:
        """Where people see the repository."""
        return f"{self.endpoint}/{self.repo_id}"

    def commit_url(self, commit: str) -> str:
        """Where people see a commit."""
        return f"{self.url}/commit/{commit}"

    def require_login(self) -> str:
        """The name of the account that publishes."""
        with translated(explain, "asking who is logged in"):
            return str(self._api.whoami()["name"])

    def read_state(self, revision: str | None = None) -> RemoteState | None:
        """The repository at the head of `main` or at a revision; None where that does not exist."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
        from huggingface_hub.hf_api import RepoFile

        with translated(explain, f"reading {self.repo_id}"):
            try:
                info = self._api.repo_info(self.repo_id, revision=revision, timeout=ANSWER_S)
                entries = list(self._api.list_repo_tree(self.repo_id, recursive=True, revision=info.sha))
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return None  # a missing one answers 401 to those who are not logged in
        files = {
            entry.path: RemoteFile(entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
            for entry in entries
            if isinstance(entry, RepoFile)
        }
        return RemoteState(str(info.sha), not info.private, files)

    def read_text(self, path: str, head: str) -> str:
        """A small text file of the repository."""
        from huggingface_hub import hf_hub_url

        http = _http()
        with translated(explain, f"reading {path}"):
            url = hf_hub_url(self.repo_id, path, revision=head, endpoint=self.endpoint)
            response = http.get_session().get(url, headers=http.build_hf_headers())
            http.hf_raise_for_status(response)
            return bytes(response.content).decode("utf-8", errors="replace")

    def create(self, *, public: bool, license_id: str) -> None:
        """Create the repository, private: it becomes public when its content was verified."""
        with translated(explain, f"creating {self.repo_id}"):
            try:
                self._api.create_repo(self.repo_id, private=True, exist_ok=True)
            except KeyError:  # a 409 whose body lacks the repository's URL (huggingface_hub#3279)
                self._api.repo_info(self.repo_id, timeout=ANSWER_S)

    def card_problems(self, card: str) -> list[str]:
        """What the hub's own validator has against a card; nothing where it does not answer."""
        http = _http()
        try:
            with translated(explain, "checking the card"):
                response = http.get_session().post(
                    f"{self.endpoint}/api/validate-yaml",
                    json={"content": card, "repoType": "model"},
                    headers=http.build_hf_headers(),
                )
            answer = response.json()
            return [redact(str(item["message"])) for item in answer.get("errors", [])]
        except (UnsettledError, ValueError, KeyError, TypeError, AttributeError):
            return []  # a second opinion that could not be had; our own rules held

    def upload_blobs(self, files: list[PublishedFile], on_bytes: Callable[[int], None]) -> None:
        """Send what the hub does not have. The client shows its own progress."""
        from huggingface_hub import CommitOperationAdd

        operations = []
        for file in files:
            operation = CommitOperationAdd(file.path, file.local)
            operation.upload_info.sha256 = bytes.fromhex(file.sha256)  # hashed once, by us
            operations.append(operation)
        with translated(explain, "uploading"):
            self._api.preupload_lfs_files(
                self.repo_id,
                operations,
                revision=self.branch,
                create_pr=self.proposes,
                free_memory=False,
            )
        self._operations = {operation.path_in_repo: operation for operation in operations}

    def commit(
        self,
        files: list[PublishedFile],
        deletes: list[str],
        message: str,
        parent: RemoteState,
    ) -> Commit:
        """One commit on top of `parent`, and on nothing else; or a pull request of it."""
        from huggingface_hub import CommitOperationDelete

        operations: list[Any] = [self._operations[file.path] for file in files]
        operations += [CommitOperationDelete(path, is_folder=False) for path in deletes]
        with translated(explain, "committing"):
            info = self._api.create_commit(
                self.repo_id,
                operations,
                commit_message=message,
                revision=self.branch,
                parent_commit=parent.head,
                create_pr=self.proposes,
            )
        if self.proposes:
            return Commit(str(info.pr_revision), str(info.pr_url), info.oid)
        return Commit(info.oid, self.commit_url(info.oid), info.oid)

    def proposals(self) -> list[Commit]:
        """The open pull requests, newest first."""
        with translated(explain, "listing pull requests"):
            found = self._api.get_repo_discussions(
                self.repo_id, discussion_type="pull_request", discussion_status="open"
            )
            numbers = sorted((item.num for item in found), reverse=True)
        return [Commit(f"refs/pr/{number}", f"{self.url}/discussions/{number}") for number in numbers]

    def tags(self) -> set[str]:
        """Names of the repository's tags."""
        with translated(explain, "listing tags"):
            return {ref.name for ref in self._api.list_repo_refs(self.repo_id).tags}

    def create_tag(self, tag: str, commit: str) -> None:
        """Tag a commit."""
        with translated(explain, f"tagging {tag}"):
            self._api.create_tag(self.repo_id, tag=tag, revision=commit)

    def make_public(self) -> None:
        """Let anyone read the repository."""
        with translated(explain, "making the repository public"):
            self._api.update_repo_settings(self.repo_id, private=False)


def _http() -> Any:
    """The client's own session and headers, which its typed interface does not export."""
    from huggingface_hub import utils

    return utils


def explain(error: BaseException, doing: str) -> Eagle3PackError | None:
    """Our error for an exception of huggingface_hub or its transport; None for anything else."""
    names = {kind.__name__ for kind in type(error).__mro__}
    modules = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    text = redact(str(error)).strip().splitlines()
    reason = text[0] if text else type(error).__name__
    said = f"{doing} failed: {reason}"
    if "HfHubHTTPError" in names:
        return _explain_status(error, doing)
    if "OfflineModeIsEnabled" in names:
        return UsageError("HF_HUB_OFFLINE is set", hint="Unset it, or plan with --offline --dry-run.")
    if "LocalTokenNotFoundError" in names:
        return PermissionDenied("not logged in to Hugging Face", hint=LOGIN_HINT)
    if "HFValidationError" in names:
        return UsageError(said, hint="Name the repository ORG/NAME.")
    if names & NO_CONNECTION:
        return UnsettledError(f"{doing} failed: no connection to the hub ({reason})", hint=AGAIN)
    if names & TRANSPORT_ERRORS or modules & {"httpx", "httpx2", "httpcore", "httpcore2"}:
        return UnsettledError(said, hint=AGAIN)
    if error.__cause__ is not None and isinstance(error, RuntimeError):  # a blob's upload, wrapped
        cause = explain(error.__cause__, doing)
        if isinstance(cause, PermissionDenied):  # storage: a signed address that has expired
            return UnsettledError(cause.problem, hint=AGAIN)
        return cause
    if "JSONDecodeError" in names:  # the client's own check of the card, when a proxy answers in HTML
        return UnsettledError(f"{doing} failed: the hub answered something else than JSON", hint=AGAIN)
    if isinstance(error, (ConnectionError, TimeoutError)) or "hf_xet" in modules:
        return UnsettledError(said, hint=XET_HINT)
    if isinstance(error, RuntimeError) and doing == "uploading":
        return UnsettledError(said, hint=XET_HINT)
    if type(error) is ValueError and ("LFS" in str(error) or "metadata" in str(error)):
        return RefusedError(said)
    return None


def _status(error: BaseException) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _explain_status(error: BaseException, doing: str) -> Eagle3PackError:
    status = _status(error)
    message = redact(str(getattr(error, "server_message", None) or error)).strip().splitlines()
    said = f"{doing} failed: {message[0] if message else 'no reason given'} (HTTP {status})"
    response = getattr(error, "response", None)
    if status in RETRYABLE:
        wait = str(response.headers.get("Retry-After", "")) if response is not None else ""
        return UnsettledError(
            said,
            hint=AGAIN,
            retry_after_s=float(wait) if wait.isdigit() else 0,
        )
    if status in (401, 403):
        if any(word in said.lower() for word in ("storage", "quota", "limit")):
            return RefusedError(said, hint="Free storage, or ask for more.")
        return PermissionDenied(said, hint=LOGIN_HINT)
    if status == 404:
        return PermissionDenied(said, hint="Is the name right, and may this account see it?")
    if status in (409, 412):
        return MovedError(said, hint="Look at what changed there, then run again.")
    if "pointer" in said.lower():
        return RefusedError(
            said, hint="A stale Xet cache can cause this: delete ~/.cache/huggingface/xet and run again."
        )
    return RefusedError(said)
