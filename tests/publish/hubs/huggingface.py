"""A Hugging Face Hub for one process: the routes that publishing and downloading a model need.

Written from what huggingface_hub 1.31, 1.33 and 2.4 send. Knows LFS with one PUT and in parts, Xet
with a store in a local folder, commits with a parent lock, pull requests, tags and settings.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.publish.hubs.server import HubServer, Reply, Request, StoredFile

TOKEN = "hf_" + "t" * 34
READ_TOKEN = "hf_" + "r" * 34
REGULAR_LIMIT_BYTES = 10_000_000
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".npy")
LICENSES = {"mit", "apache-2.0", "other", "llama3.1"}  # enough of the hub's list for the tests
EMPTY: dict[str, StoredFile] = {}
ID = r"(?P<repo_id>[\w.-]+/[\w.-]+)"


@dataclass
class Commit:
    """A commit and the whole tree it stands for."""

    oid: str
    title: str
    files: dict[str, StoredFile]


@dataclass
class Repo:
    """A model repository."""

    private: bool
    branches: dict[str, list[Commit]]
    tags: dict[str, str] = field(default_factory=dict)
    pull_requests: dict[int, list[Commit]] = field(default_factory=dict)

    def history(self, revision: str) -> list[Commit]:
        """The commits up to a branch, tag, commit id or refs/pr/N, newest first."""
        if revision in self.branches:
            return self.branches[revision]
        if match := re.fullmatch(r"refs/pr/(\d+)", revision):
            return self.pull_requests.get(int(match[1]), [])
        oid = self.tags.get(revision, revision)
        for commits in [*self.branches.values(), *self.pull_requests.values()]:
            for i, commit in enumerate(commits):
                if commit.oid == oid:
                    return commits[i:]
        return []


class HuggingFace(HubServer):
    """The hub.

    Args:
        root: folder for blobs.
        part_bytes: upload LFS files in parts of this size; None for one PUT.
    """

    def __init__(self, root: Path, *, part_bytes: int | None = None) -> None:
        self.repos: dict[str, Repo] = {}
        self.part_bytes = part_bytes
        self.xet_root = root / "xet"
        self.parts: dict[str, dict[int, bytes]] = {}
        super().__init__(root)

    def table(self) -> list[tuple[str, str, Callable[..., Reply]]]:
        return [
            ("GET", "/api/agent-harnesses", lambda request: Reply(404)),
            ("GET", "/api/whoami-v2", self.whoami),
            ("POST", "/api/repos/create", self.create),
            ("POST", "/api/validate-yaml", self.validate_yaml),
            ("GET", f"/api/models/{ID}", self.info),
            ("GET", f"/api/models/{ID}/revision/(?P<revision>.+)", self.info),
            ("GET", f"/api/models/{ID}/auth-check(/write)?", self.auth_check),
            ("POST", f"/api/models/{ID}/preupload/(?P<revision>.+)", self.preupload),
            ("GET", f"/api/models/{ID}/xet-write-token/(?P<revision>.+)", self.xet_token),
            ("POST", f"/{ID}.git/info/lfs/objects/batch", self.lfs_batch),
            ("PUT", "/storage/(?P<oid>[0-9a-f]{64})", self.put_blob),
            ("PUT", "/storage/(?P<oid>[0-9a-f]{64})/(?P<part>[0-9]+)", self.put_part),
            ("GET", "/storage/(?P<oid>[0-9a-f]{64})", self.get_blob),
            ("POST", "/complete/(?P<oid>[0-9a-f]{64})", self.complete),
            ("POST", "/verify-lfs", self.verify_lfs),
            ("POST", f"/api/models/{ID}/commit/(?P<revision>.+)", self.commit),
            ("GET", f"/api/models/{ID}/tree/(?P<revision>[^/]+|refs/pr/[0-9]+)", self.tree),
            ("POST", f"/api/models/{ID}/paths-info/(?P<revision>.+)", self.tree),
            ("GET", f"/api/models/{ID}/refs", self.refs),
            ("GET", f"/api/models/{ID}/discussions", self.discussions),
            ("GET", f"/api/models/{ID}/commits/(?P<revision>.+)", self.commits),
            ("POST", f"/api/models/{ID}/tag/(?P<revision>.+)", self.tag),
            ("PUT", f"/api/models/{ID}/settings", self.settings),
            ("HEAD", f"/{ID}/resolve/(?P<revision>[^/]+|refs/pr/[0-9]+)/(?P<path>.+)", self.resolve),
            ("GET", f"/{ID}/resolve/(?P<revision>[^/]+|refs/pr/[0-9]+)/(?P<path>.+)", self.resolve),
        ]

    # Who asks

    def refusal(self, request: Request, repo_id: str = "", *, write: bool = False) -> Reply | None:
        """Why a request may not pass, or None."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in (TOKEN, READ_TOKEN):
            return error(401, "Invalid credentials in Authorization header")
        repo = self.repos.get(repo_id)
        if repo_id and (repo is None or (repo.private and not token)):
            return error(401 if not token else 404, "Repository not found", "RepoNotFound")
        if write and token != TOKEN:
            return error(403 if token else 401, "You don't have the rights: the token is read-only")
        return None

    def whoami(self, request: Request) -> Reply:
        if refused := self.refusal(request):
            return refused
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not token:
            return error(401, "Invalid username or password.")
        role = "write" if token == TOKEN else "read"
        return Reply(
            body={
                "type": "user",
                "name": "tester",
                "orgs": [{"name": "org", "roleInOrg": "admin"}],
                "auth": {"accessToken": {"role": role, "displayName": "test"}},
            }
        )

    def auth_check(self, request: Request, repo_id: str) -> Reply:
        return self.refusal(request, repo_id, write=request.path.endswith("/write")) or Reply()

    # Repositories

    def create(self, request: Request) -> Reply:
        if refused := self.refusal(request, write=True):
            return refused
        asked = request.json()
        repo_id = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        url = f"{self.endpoint}/{repo_id}"
        if repo_id in self.repos:
            return Reply(409, {"error": "You already created this model repo", "url": url})
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        files = {".gitattributes": self.store(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")}
        self.repos[repo_id] = Repo(
            private, {"main": [Commit(new_oid(None, "initial"), "initial commit", files)]}
        )
        return Reply(body={"url": url, "name": repo_id, "id": repo_id})

    def info(self, request: Request, repo_id: str, revision: str = "main") -> Reply:
        if refused := self.refusal(request, repo_id):
            return refused
        repo = self.repos[repo_id]
        history = repo.history(revision)
        if not history:
            return error(404, "Revision not found", "RevisionNotFound")
        return Reply(
            body={
                "id": repo_id,
                "modelId": repo_id,
                "author": repo_id.split("/")[0],
                "sha": history[0].oid,
                "private": repo.private,
                "gated": False,
                "disabled": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [{"rfilename": path} for path in sorted(history[0].files)],
            }
        )

    def settings(self, request: Request, repo_id: str) -> Reply:
        if refused := self.refusal(request, repo_id, write=True):
            return refused
        asked = request.json()
        if "visibility" in asked or "private" in asked:
            self.repos[repo_id].private = asked.get("visibility") == "private" or bool(asked.get("private"))
        return Reply(body={"private": self.repos[repo_id].private})

    # The card

    def validate_yaml(self, request: Request) -> Reply:
        import yaml

        content = request.json()["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, re.S)
        if not match:
            return Reply(body={"errors": [], "warnings": [{"message": "empty or missing yaml metadata"}]})
        card, problems = yaml.safe_load(match[1]), []
        if card.get("license") not in LICENSES:
            problems.append('"license" must be one of [apache-2.0, mit, ...]')
        for base in listed(card.get("base_model")):
            if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", base):
                problems.append('"base_model" with value "{base}" is not valid. Use a model id from hf.co')
        if card.get("base_model_relation") not in (None, "adapter", "merge", "quantized", "finetune"):
            problems.append('"base_model_relation" must be one of [adapter, merge, quantized, finetune]')
        for result in [r for entry in card.get("model-index") or [] for r in entry["results"]]:
            for key in ("config", "split", "revision"):
                if key in result["dataset"] and not isinstance(result["dataset"][key], str):
                    problems.append(f'"model-index[0].results[0].dataset.{key}" must be a string')
        status = 400 if problems else 200
        return Reply(status, {"errors": [{"message": text} for text in problems], "warnings": []})

    # Blobs

    def preupload(self, request: Request, repo_id: str, revision: str) -> Reply:
        if refused := self.refusal(request, repo_id, write=True):
            return refused
        history = self.repos[repo_id].history(revision)
        present = history[0].files if history else EMPTY
        files = []
        for file in request.json()["files"]:
            lfs = file["path"].endswith(LFS_SUFFIXES) or file["size"] > REGULAR_LIMIT_BYTES
            entry = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            if stored := present.get(file["path"]):
                entry["oid"] = stored.sha256 if stored.lfs else self.git_oid(stored)
            files.append(entry)
        return Reply(body={"files": files})

    def xet_token(self, request: Request, repo_id: str, revision: str) -> Reply:
        if refused := self.refusal(request, repo_id, write=True):
            return refused
        self.xet_root.mkdir(exist_ok=True)
        grant = {"accessToken": "xet", "exp": 4_000_000_000, "casUrl": f"local://{self.xet_root}"}
        headers = {
            "X-Xet-Cas-Url": grant["casUrl"],
            "X-Xet-Access-Token": "xet",
            "X-Xet-Token-Expiration": "4000000000",
        }
        return Reply(body=grant, headers={name: str(value) for name, value in headers.items()})

    def lfs_batch(self, request: Request, repo_id: str) -> Reply:
        if refused := self.refusal(request, repo_id, write=True):
            return refused
        objects = []
        for wanted in request.json()["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if not self.blobs.has(oid):
                upload: dict[str, Any] = {"href": f"{self.storage}/{oid}?X-Amz-Signature=secret"}
                if self.part_bytes:
                    count = -(-size // self.part_bytes)
                    urls = {str(i + 1): f"{self.storage}/{oid}/{i + 1}?sig=secret" for i in range(count)}
                    upload = {
                        "href": f"{self.endpoint}/complete/{oid}",
                        "header": {"chunk_size": str(self.part_bytes), **urls},
                    }
                entry["actions"] = {"upload": upload, "verify": {"href": f"{self.endpoint}/verify-lfs"}}
            objects.append(entry)
        return Reply(body={"transfer": "multipart" if self.part_bytes else "basic", "objects": objects})

    def put_blob(self, request: Request, oid: str) -> Reply:
        if "authorization" in request.headers:
            return error(400, "Only one auth mechanism allowed")
        found, _ = self.blobs.put(request.blocks())
        return Reply() if found == oid else error(400, "the content does not have that sha256")

    def put_part(self, request: Request, oid: str, part: str) -> Reply:
        if "authorization" in request.headers:
            return error(400, "Only one auth mechanism allowed")
        data = request.body()
        with self.lock:
            self.parts.setdefault(oid, {})[int(part)] = data
        return Reply(headers={"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def complete(self, request: Request, oid: str) -> Reply:
        parts = self.parts.pop(oid)
        asked = [part["partNumber"] for part in request.json()["parts"]]
        found, _ = self.blobs.put(iter([parts[number] for number in asked]))
        return Reply() if found == oid else error(400, "the parts do not give that sha256")

    def verify_lfs(self, request: Request) -> Reply:
        if refused := self.refusal(request, write=True):
            return refused
        return Reply() if self.blobs.has(request.json()["oid"]) else error(404, "no such object")

    def get_blob(self, request: Request, oid: str) -> Reply:
        if "authorization" in request.headers:
            return error(400, "Only one auth mechanism allowed")
        return Reply(body=self.blobs.path(oid)) if self.blobs.has(oid) else error(404, "no such object")

    # Commits

    def commit(self, request: Request, repo_id: str, revision: str) -> Reply:
        if refused := self.refusal(request, repo_id, write=True):
            return refused
        with self.lock:
            return self._commit(request, self.repos[repo_id], repo_id, revision)

    def _commit(self, request: Request, repo: Repo, repo_id: str, revision: str) -> Reply:
        history = repo.history(revision)
        files, header = dict(history[0].files), {}
        for line in request.body().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                header = value
            elif item["key"] == "file":
                files[value["path"]] = self.store(base64.b64decode(value["content"]))
            elif item["key"] == "lfsFile":
                if not self.blobs.has(value["oid"]) and not self.xet_root.exists():
                    return error(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
                files[value["path"]] = StoredFile(value["oid"], value["size"], lfs=True)
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        if header.get("parentCommit") not in (None, history[0].oid):
            return error(412, "A commit has happened since. Please refresh and try again.")
        title = header["summary"]
        new = Commit(
            new_oid(history[0].oid, json.dumps([title, sorted(files.items())], default=str)), title, files
        )
        answer: dict[str, Any] = {
            "success": True,
            "commitOid": new.oid,
            "commitUrl": f"{self.endpoint}/{repo_id}/commit/{new.oid}",
            "hookOutput": "",
        }
        if request.query.get("create_pr") == "1":
            number = len(repo.pull_requests) + 1
            repo.pull_requests[number] = [new, *history]
            answer["pullRequestUrl"] = f"{self.endpoint}/{repo_id}/discussions/{number}"
        else:
            repo.branches[revision] = [new, *history]
        return Reply(body=answer)

    def tree(self, request: Request, repo_id: str, revision: str) -> Reply:
        if refused := self.refusal(request, repo_id):
            return refused
        history = self.repos[repo_id].history(revision)
        if not history:
            return error(404, "Revision not found", "RevisionNotFound")
        entries = []
        for path, file in sorted(history[0].files.items()):
            entry: dict[str, Any] = {
                "type": "file",
                "path": path,
                "size": file.size,
                "oid": self.git_oid(file),
            }
            if file.lfs:
                entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": len(pointer(file))}
            entries.append(entry)
        return Reply(body=entries)

    def commits(self, request: Request, repo_id: str, revision: str) -> Reply:
        history = self.repos[repo_id].history(revision)
        return Reply(
            body=[
                {
                    "id": c.oid,
                    "title": c.title,
                    "message": "",
                    "date": "2026-01-01T00:00:00.000Z",
                    "authors": [],
                }
                for c in history
            ]
        )

    def refs(self, request: Request, repo_id: str) -> Reply:
        if refused := self.refusal(request, repo_id):
            return refused
        repo = self.repos[repo_id]
        answer: dict[str, Any] = {
            "branches": [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commits[0].oid}
                for name, commits in repo.branches.items()
            ],
            "tags": [
                {"name": name, "ref": f"refs/tags/{name}", "targetCommit": oid}
                for name, oid in repo.tags.items()
            ],
            "converts": [],
        }
        if request.query.get("include_prs"):
            answer["pullRequests"] = [
                {"name": f"refs/pr/{n}", "ref": f"refs/pr/{n}", "targetCommit": commits[0].oid}
                for n, commits in repo.pull_requests.items()
            ]
        return Reply(body=answer)

    def discussions(self, request: Request, repo_id: str) -> Reply:
        if refused := self.refusal(request, repo_id):
            return refused
        numbers = sorted(self.repos[repo_id].pull_requests, reverse=True)
        found = [
            {
                "num": number,
                "title": self.repos[repo_id].pull_requests[number][0].title,
                "author": {"name": "tester"},
                "repo": {"name": repo_id, "type": "model"},
                "isPullRequest": True,
                "status": "open",
                "createdAt": "2026-01-01T00:00:00.000Z",
            }
            for number in numbers
        ]
        return Reply(body={"discussions": found, "count": len(found), "start": 0})

    def tag(self, request: Request, repo_id: str, revision: str) -> Reply:
        if refused := self.refusal(request, repo_id, write=True):
            return refused
        repo, name = self.repos[repo_id], request.json()["tag"]
        if name in repo.tags:
            return error(409, "Tag reference exists already")
        repo.tags[name] = repo.history(revision)[0].oid
        return Reply()

    def resolve(self, request: Request, repo_id: str, revision: str, path: str) -> Reply:
        if refused := self.refusal(request, repo_id):
            return refused
        history = self.repos[repo_id].history(revision)
        file = history[0].files.get(path) if history else None
        if file is None:
            return error(404, "Entry not found", "EntryNotFound" if history else "RevisionNotFound")
        headers = {
            "X-Repo-Commit": history[0].oid,
            "ETag": f'"{self.git_oid(file)}"',
            "Accept-Ranges": "bytes",
        }
        if not file.lfs:
            return Reply(body=self.blobs.path(file.sha256), headers=headers)
        headers |= {
            "X-Linked-Etag": f'"{file.sha256}"',
            "X-Linked-Size": str(file.size),
            "Location": f"{self.storage}/{file.sha256}",
        }
        return Reply(302, b"", headers)

    # Content

    def store(self, data: bytes) -> StoredFile:
        sha256, size = self.blobs.put(iter([data]))
        return StoredFile(sha256, size, lfs=False)

    def git_oid(self, file: StoredFile) -> str:
        data = pointer(file) if file.lfs else self.blobs.path(file.sha256).read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def write_as_someone_else(self, repo_id: str, path: str, data: bytes) -> None:
        """A commit by another client."""
        with self.lock:
            history = self.repos[repo_id].branches["main"]
            files = history[0].files | {path: self.store(data)}
            self.repos[repo_id].branches["main"] = [
                Commit(new_oid(history[0].oid, path + self.store(data).sha256), "by someone else", files),
                *history,
            ]


def error(status: int, message: str, code: str = "") -> Reply:
    return Reply(status, {"error": message}, {"X-Error-Message": message, "X-Error-Code": code})


def new_oid(parent: str | None, what: str) -> str:
    return hashlib.sha1(f"{parent} {what}".encode()).hexdigest()


def pointer(file: StoredFile) -> bytes:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{file.sha256}\nsize {file.size}\n"
    return text.encode()


def listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]
