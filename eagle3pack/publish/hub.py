"""What publishing needs of a hub, as one small protocol; an adapter for each hub fulfils it.

The adapters own transport alone. What a lost answer means, when to try again, and whether what is
there equals what was sent is decided in flow.py, alike for both hubs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit

from eagle3pack.errors import ConflictError, Eagle3PackError, TransportError, UsageError

HubKind = Literal["hf", "ms"]
HUB_NAMES: Mapping[HubKind, str] = {"hf": "Hugging Face", "ms": "ModelScope"}

# Shapes of credentials and of what signs a URL: none of them may reach a message, a log or a record.
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|ms-[0-9a-fA-F]{8}[0-9a-fA-F-]*)|(?<=Bearer )\S+|(?<=m_session_id=)\S+"
)
_QUERY = re.compile(r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>]*")


class UnsettledError(TransportError):
    """A request whose outcome is not known, or that may be tried again.

    Attributes:
        retry_after_s: what the hub asked us to wait, if it did.
    """

    def __init__(self, problem: str, *, where: str = "", hint: str = "", retry_after_s: float = 0) -> None:
        super().__init__(problem, where=where, hint=hint)
        self.retry_after_s = retry_after_s


class MovedError(ConflictError):
    """The branch is not where it was when we looked; whether by our own lost commit, flow.py finds out."""


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file as it is to stand in the repository.

    Attributes:
        path: its name there.
        local: where its bytes are now.
        size: in bytes.
        sha256: of its bytes.
        git_sha1: the id that git gives it; None for files too large to be kept by git itself.
    """

    path: str
    local: Path
    size: int
    sha256: str
    git_sha1: str | None = None


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as a hub lists it: with the digest of its content, of one kind or the other."""

    size: int
    sha256: str | None = None
    git_sha1: str | None = None

    def holds(self, file: PublishedFile) -> bool:
        """The hub has exactly these bytes."""
        if self.size != file.size:
            return False
        return self.sha256 == file.sha256 if self.sha256 else self.git_sha1 == file.git_sha1


@dataclass(frozen=True, slots=True)
class RemoteState:
    """A repository at one moment.

    Attributes:
        head: names that moment: the commit, or a digest of the listing where the hub tells no commit.
        public: anyone may read it.
        files: by path.
    """

    head: str
    public: bool
    files: Mapping[str, RemoteFile]

    def lacks(self, files: Iterable[PublishedFile]) -> list[PublishedFile]:
        """Those of the files that are not there or have other bytes."""
        return [f for f in files if f.path not in self.files or not self.files[f.path].holds(f)]


class Hub(Protocol):
    """One repository on one hub.

    Every method raises PermissionDenied, RefusedError, ConflictError or UnsettledError, and no exception
    of a client library.

    Attributes:
        kind: which hub.
        repo_id: ORG/NAME.
        endpoint: the hub's address.
        branch: that commits go to.
        proposes: commits become pull requests.
    """

    kind: HubKind
    repo_id: str
    endpoint: str
    branch: str
    proposes: bool

    @property
    def url(self) -> str:
        """Where people see the repository."""

    def commit_url(self, commit: str) -> str:
        """Where people see a commit."""

    def require_login(self) -> str:
        """The name of the account that publishes; raises where there is none."""

    def read_state(self, revision: str | None = None) -> RemoteState | None:
        """The repository at the head of its branch or at a revision; None where that does not exist."""

    def read_text(self, path: str, head: str) -> str:
        """A small text file of the repository."""

    def create(self, *, public: bool, license_id: str) -> None:
        """Create the repository; that it exists already is no error."""

    def card_problems(self, card: str) -> list[str]:
        """What the hub itself has against a card."""

    def upload_blobs(self, files: list[PublishedFile], on_bytes: Callable[[int], None]) -> None:
        """Bring the content of files to the hub's storage, where nobody sees it before a commit."""

    def commit(
        self, files: list[PublishedFile], deletes: list[str], message: str, parent: RemoteState
    ) -> Commit:
        """Make one commit of files whose blobs are there; or propose it."""

    def proposals(self) -> list[Commit]:
        """The open pull requests, newest first."""

    def tags(self) -> set[str]:
        """Names of the repository's tags."""

    def create_tag(self, tag: str, commit: str) -> None:
        """Tag a commit."""

    def make_public(self) -> None:
        """Let anyone read the repository."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit left behind.

    Attributes:
        revision: reads the files of it: a commit id, a branch, or refs/pr/N.
        url: where people see it.
        id: the commit's own name, where the hub told it.
    """

    revision: str
    url: str
    id: str = ""


@contextmanager
def translated(explain: Callable[[BaseException, str], Eagle3PackError | None], doing: str) -> Iterator[None]:
    """Turn a hub client's exceptions into ours; what is no fault of transport or hub passes.

    Args:
        explain: our error for an exception of that client or its transport; None for anything else.
        doing: what was being done, for the message.
    """
    try:
        yield
    except Eagle3PackError:
        raise
    except Exception as error:
        ours = explain(error, doing)
        if ours is None:
            raise
        raise ours from error


def require_safe_endpoint(endpoint: str) -> str:
    """Refuse to send credentials in clear text to another machine.

    Raises:
        UsageError: the endpoint is http and not on loopback.
    """
    parts = urlsplit(endpoint)
    if parts.scheme == "https" or (
        parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
    ):
        return endpoint.rstrip("/")
    raise UsageError(
        "is no https address: a token would travel in clear text",
        where=redact(endpoint),
        hint="Set HF_ENDPOINT or MODELSCOPE_ENDPOINT to an https address (http only on localhost).",
    )


def redact(text: str) -> str:
    """A message without credentials and without the signed part of URLs."""
    return _TOKEN.sub("***", _QUERY.sub(r"\1", text))
