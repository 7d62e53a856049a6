"""A ModelScope for one process: the routes that publishing and downloading a model need.

Written from what modelscope_hub 0.5 sends.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.publish.hubs.server import HubServer, Reply, Request, StoredFile

TOKEN = "ms-12345678-1234-1234-1234-123456789abc"
TEMPLATE = "---\nlicense: Apache License 2.0\n---\n###### 该模型当前使用的是默认介绍模版\n".encode()
ID = r"(?P<repo_id>[\w.-]+/[\w.-]+)"
PRIVATE, PUBLIC = 1, 5


@dataclass
class Commit:
    """A commit and the whole tree it stands for."""

    oid: str
    message: str
    files: dict[str, StoredFile]


@dataclass
class Repo:
    """A model repository."""

    visibility: int
    license: str
    commits: list[Commit]
    tags: dict[str, Commit] = field(default_factory=dict)


class ModelScope(HubServer):
    """The hub.

    Args:
        root: folder for blobs.
        own_storage: blobs go to the hub's own host, with credentials; else to a foreign host.
    """

    def __init__(self, root: Path, *, own_storage: bool = False) -> None:
        self.repos: dict[str, Repo] = {}
        self.own_storage = own_storage
        self.leaves_out: set[str] = set()  # digests that the batch answer does not mention
        super().__init__(root)

    def table(self) -> list[tuple[str, str, Callable[..., Reply]]]:
        return [
            ("GET", "/openapi/v1/users/me", self.whoami),
            ("POST", "/api/v1/models", self.create),
            ("GET", f"/openapi/v1/models/{ID}", self.info_openapi),
            ("GET", f"/api/v1/models/{ID}", self.info),
            ("POST", f"/api/v1/repos/models/{ID}/info/lfs/objects/batch", self.batch),
            ("PUT", "/storage/(?P<oid>[0-9a-f]{64})", self.put_blob),
            ("POST", f"/api/v1/repos/models/{ID}/commit/(?P<revision>.+)", self.commit),
            ("GET", f"/api/v1/models/{ID}/repo/files", self.files),
            ("GET", f"/api/v1/models/{ID}/repo", self.get),
            ("GET", f"/api/v1/models/{ID}/revisions", self.revisions),
            ("POST", f"/api/v1/models/{ID}/repo/tag", self.tag),
        ]

    def refusal(self, request: Request, repo_id: str = "", *, write: bool = False) -> Reply | None:
        """Why a request may not pass, or None."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token != TOKEN:
            return answer(None, 401, "the token is invalid")
        repo = self.repos.get(repo_id)
        if repo_id and (repo is None or (repo.visibility != PUBLIC and not token)):
            return answer(None, 404, "模型不存在")
        return answer(None, 401, "user not logged in") if write and not token else None

    def whoami(self, request: Request) -> Reply:
        if refused := self.refusal(request, write=True):
            return refused
        return Reply(body={"success": True, "data": {"username": "tester", "email": "t@example.org"}})

    def create(self, request: Request) -> Reply:
        if refused := self.refusal(request, write=True):
            return refused
        asked = request.json()
        repo_id = f"{asked['Path']}/{asked['Name']}"
        if repo_id in self.repos:
            return answer(None, 400, "该名称已被注册使用，请重新命名", code=10010101001)
        files = {
            ".gitattributes": self.store(b"*.safetensors filter=lfs\n"),
            "README.md": self.store(TEMPLATE),
            "configuration.json": self.store(b"{}"),
        }
        visibility, license_ = asked.get("Visibility", PUBLIC), asked.get("License", "Apache-2.0")
        self.repos[repo_id] = Repo(visibility, license_, [Commit(oid_of("", files), "initial", files)])
        return answer({"Id": 1, "Path": asked["Path"], "Name": asked["Name"]})

    def info(self, request: Request, repo_id: str) -> Reply:
        if refused := self.refusal(request, repo_id):
            return refused
        repo, (owner, name) = self.repos[repo_id], repo_id.split("/")
        return answer({"Path": owner, "Name": name, "Visibility": repo.visibility, "License": repo.license})

    def info_openapi(self, request: Request, repo_id: str) -> Reply:
        if refused := self.refusal(request, repo_id):
            return refused
        repo = self.repos[repo_id]
        return Reply(body={"success": True, "data": {"id": repo_id, "visibility": repo.visibility}})

    def batch(self, request: Request, repo_id: str) -> Reply:
        if refused := self.refusal(request, repo_id, write=True):
            return refused
        base = f"{self.endpoint}/storage" if self.own_storage else self.storage
        objects = []
        for wanted in request.json()["objects"]:
            if wanted["oid"] in self.leaves_out:
                continue
            entry: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if not self.blobs.has(wanted["oid"]):
                entry["actions"] = {"upload": {"href": f"{base}/{wanted['oid']}?Signature=secret"}}
            objects.append(entry)
        return answer({"objects": objects})

    def put_blob(self, request: Request, oid: str) -> Reply:
        if request.host != "localhost" and ({"authorization", "cookie"} & set(request.headers)):
            return Reply(400, {"Message": "credentials sent to a foreign host"})
        found, _ = self.blobs.put(request.blocks())
        return Reply() if found == oid else Reply(400, {"Message": "the content does not have that sha256"})

    def commit(self, request: Request, repo_id: str, revision: str) -> Reply:
        if refused := self.refusal(request, repo_id, write=True):
            return refused
        with self.lock:
            repo, asked = self.repos[repo_id], request.json()
            if revision != "master":
                return answer(None, 400, "the revision is no branch")
            files = dict(repo.commits[0].files)
            for action in asked["actions"]:
                path = action["path"]
                if action["action"] == "delete":
                    files.pop(path, None)
                elif action["type"] == "lfs":
                    if not self.blobs.has(action["sha256"]) and action["sha256"] not in self.leaves_out:
                        return answer(None, 400, f"blob of {path} is missing")
                    files[path] = StoredFile(action["sha256"], action["size"], lfs=True)
                else:
                    files[path] = self.store(base64.b64decode(action["content"]))
            for path in [path for path, file in files.items() if file.sha256 in self.leaves_out]:
                files.pop(path)  # the real hub's behaviour is unknown; verification has to notice
            commit = Commit(oid_of(repo.commits[0].oid, files), asked["commit_message"], files)
            repo.commits.insert(0, commit)
            return answer({"oid": commit.oid, "id": commit.oid})

    def files(self, request: Request, repo_id: str) -> Reply:
        if refused := self.refusal(request, repo_id):
            return refused
        commit = self.find(repo_id, request.query.get("Revision", "master"))
        if commit is None:
            return answer(None, 404, "the revision does not exist")
        entries = [
            {
                "Path": path,
                "Name": path.rsplit("/", 1)[-1],
                "Type": "blob",
                "Size": file.size,
                "Sha256": file.sha256,
                "IsLFS": file.lfs,
                "Revision": commit.oid,
                "CommittedDate": 1_780_000_000,
            }
            for path, file in sorted(commit.files.items())
        ]
        return answer({"Files": entries})

    def get(self, request: Request, repo_id: str) -> Reply:
        if refused := self.refusal(request, repo_id):
            return refused
        commit = self.find(repo_id, request.query.get("Revision", "master"))
        file = commit.files.get(request.query["FilePath"]) if commit else None
        if file is None:
            return answer(None, 404, "the file does not exist")
        return Reply(body=self.blobs.path(file.sha256))

    def revisions(self, request: Request, repo_id: str) -> Reply:
        if refused := self.refusal(request, repo_id):
            return refused
        repo = self.repos[repo_id]
        branches = [{"Revision": "master", "CreatedAt": 1_780_000_000}]
        tags = [{"Revision": name, "CreatedAt": 1_780_000_000} for name in repo.tags]
        return answer({"RevisionMap": {"Branches": branches, "Tags": tags}})

    def tag(self, request: Request, repo_id: str) -> Reply:
        if refused := self.refusal(request, repo_id, write=True):
            return refused
        asked = request.json()
        commit = self.find(repo_id, asked["Ref"])
        if commit is None or asked["TagName"] in self.repos[repo_id].tags:
            return answer(None, 400, "the tag exists or its revision does not")
        self.repos[repo_id].tags[asked["TagName"]] = commit
        return answer({"TagName": asked["TagName"]})

    def find(self, repo_id: str, revision: str) -> Commit | None:
        repo = self.repos[repo_id]
        if revision == "master":
            return repo.commits[0]
        by_oid = {commit.oid: commit for commit in repo.commits}
        return repo.tags.get(revision) or by_oid.get(revision)

    def store(self, data: bytes) -> StoredFile:
        sha256, size = self.blobs.put(iter([data]))
        return StoredFile(sha256, size, lfs=False)

    def write_as_someone_else(self, repo_id: str, path: str, data: bytes) -> None:
        """A commit by another client."""
        with self.lock:
            commits = self.repos[repo_id].commits
            files = commits[0].files | {path: self.store(data)}
            commits.insert(0, Commit(oid_of(commits[0].oid, files), "by someone else", files))


def answer(data: Any, status: int = 200, message: str = "", code: int | None = None) -> Reply:
    body = {
        "Code": code or status,
        "Data": data,
        "Message": message or "success",
        "RequestId": "test",
        "Success": status == 200,
    }
    return Reply(status, body)


def oid_of(parent: str, files: dict[str, StoredFile]) -> str:
    return hashlib.sha1(f"{parent} {json.dumps(sorted(files.items()), default=str)}".encode()).hexdigest()
