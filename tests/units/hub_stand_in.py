"""A stand-in for the Hugging Face hub: the part of its HTTP API that the hub's client (2.4) uses for model repositories.

1. `StandIn` serves 127.0.0.1 from a thread and keeps repositories in memory: commits, each a whole tree of files.
2. Writing needs the token, reading a private repository too; errors carry the hub's X-Error-Code.
3. Every request is in `requests`. One that it does not understand gets a 404 and is in `unexpected` as well.

Large files go through the commit as text (uploadMode "regular"): the hub itself would ask for its own file storage, which
is the client's business alone.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_stand_in"


class Repository:
    """Commits in order, each with all its files; `private` ones are read with the token only."""

    def __init__(self, private: bool = False):
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.commit({})

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    def commit(self, files: dict[str, bytes]) -> str:
        name = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[name] = files
        return name

    def at(self, revision: str) -> str | None:
        return self.head if revision == "main" else revision if revision in self.commits else None


class StandIn:
    """`with StandIn() as hub:` serves at `hub.url`."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.unexpected: list[str] = []
        hub = self

        class Handler(_Handler):
            stand_in = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "StandIn":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    # HTTP/1.0, the base class's: every answer closes its connection, so that a stand-in that has ended answers nobody.
    stand_in: StandIn
    # Method and path of each thing that it understands; groups are the arguments.
    ROUTES = (
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/models/(\w[\w.-]*/[\w.-]+)/preupload/([^/]+)", "preupload"),
        ("POST", r"/api/models/(\w[\w.-]*/[\w.-]+)/commit/([^/]+)", "commit"),
        ("GET", r"/api/models/(\w[\w.-]*/[\w.-]+)()", "info"),
        ("GET", r"/api/models/(\w[\w.-]*/[\w.-]+)/revision/([^/]+)", "info"),
        ("GET", r"/api/models/(\w[\w.-]*/[\w.-]+)/tree/([^/]+)", "tree"),
        ("HEAD", r"/(\w[\w.-]*/[\w.-]+)/resolve/([^/]+)/(.+)", "file"),
        ("GET", r"/(\w[\w.-]*/[\w.-]+)/resolve/([^/]+)/(.+)", "file"),
    )

    def _handle(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.stand_in.requests.append(f"{self.command} {path}")
        for method, pattern, name in self.ROUTES:
            if method == self.command and (found := re.fullmatch(pattern, path)):
                getattr(self, name)(*found.groups())
                return
        self.stand_in.unexpected.append(f"{self.command} {self.path}")
        self._json({"error": "the stand-in does not know this request"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _handle

    # ------------------------------------------------------------------ writing

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization')}/{asked['name']}"
        if not self._may_write():
            return
        if name in self.stand_in.repositories:
            self._json({"error": "You already created this model repo", "url": f"{self.stand_in.url}/{name}"}, 409)
            return
        self.stand_in.repositories[name] = Repository(asked.get("visibility") == "private")
        self._json({"url": f"{self.stand_in.url}/{name}", "name": name})

    def validate_yaml(self) -> None:
        text = json.loads(self.body)["content"]
        good = text.startswith("---\n") and "\n---\n" in text
        self._json({"errors": [] if good else [{"message": "no metadata"}], "warnings": []}, 200 if good else 400)

    def preupload(self, name: str, revision: str) -> None:
        if not self._may_write() or self._repository(name, revision) is None:
            return
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        self._json({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})

    def commit(self, name: str, revision: str) -> None:
        if not self._may_write() or (found := self._repository(name, revision)) is None:
            return
        repository, at = found
        files = dict(repository.commits[at])
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                assert value["encoding"] == "base64", value["encoding"]
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
            elif operation["key"] != "header":
                self.stand_in.unexpected.append(f"commit with {operation['key']}")
                self._json({"error": f"the stand-in does not know {operation['key']}"}, 400)
                return
        commit = repository.commit(files)
        self._json({"success": True, "commitOid": commit, "commitUrl": f"{self.stand_in.url}/{name}/commit/{commit}"})

    # ------------------------------------------------------------------ reading

    def info(self, name: str, revision: str) -> None:
        if (found := self._repository(name, revision or "main")) is None:
            return
        repository, commit = found
        siblings = [{"rfilename": path} for path in repository.commits[commit]]
        self._json({"_id": name, "id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": repository.private})

    def tree(self, name: str, revision: str) -> None:
        if (found := self._repository(name, revision)) is None:
            return
        assert parse_qs(urlsplit(self.path).query).get("recursive", ["true"]) != ["false"]
        repository, commit = found
        files = repository.commits[commit]
        self._json([{"type": "file", "path": path, "size": len(files[path]), "oid": _oid(files[path])} for path in files])

    def file(self, name: str, revision: str, path: str) -> None:
        if (found := self._repository(name, revision)) is None:
            return
        repository, commit = found
        if path not in repository.commits[commit]:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        content = repository.commits[commit][path]
        self._send(200, content, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit})

    # ------------------------------------------------------------------ answers

    def _may_write(self) -> bool:
        if self._has_token():
            return True
        self._json({"error": "Invalid username or password."}, 401)
        return False

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and the commit that the revision means; otherwise the error is sent."""
        repository = self.stand_in.repositories.get(name)
        if repository is None or (repository.private and not self._has_token()):
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return None
        commit = repository.at(revision)
        if commit is None:
            self._json({"error": f"Invalid rev id: {revision}"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return repository, commit

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        more = {"Content-Type": "application/json", **(headers or {})}
        if status >= 400 and isinstance(value, dict):
            more["X-Error-Message"] = value.get("error", "refused")
        self._send(status, body, more)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass  # `requests` is the log


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
