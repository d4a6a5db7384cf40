"""A Hub in one process: the part of the Hugging Face Hub's HTTP interface that pushing and loading a model, and streaming
a dataset, use. Datasets and models share their names."""

import base64
import hashlib
import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class FakeHub:
    """Repositories as {"org/name": {"main": {path: bytes}}}, what was uploaded, and one token that may write."""

    token = "hf_may_write"
    user = "someone"  # the owner of the token

    def __init__(self):
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}  # large files, by digest
        self.uploads: list[str] = []  # digests, one for each upload
        self.fail_reads = 0  # number of reads of parts of files to answer with a broken connection
        self.fail_commits = 0  # number of commits to answer with a broken connection
        self.url = ""

    def sha(self, files: dict[str, bytes]) -> str:
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()

    def files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """The files of a repository at a branch or a commit."""
        branches = self.repos.get(name, {})
        if revision in branches:
            return branches[revision]
        return next((files for files in branches.values() if self.sha(files) == revision), None)

    def listing(self, files: dict[str, bytes]) -> list[dict]:
        sizes = {path: {"size": len(data), "oid": hashlib.sha1(data).hexdigest()} for path, data in files.items()}
        return [{"type": "file", "path": path, **size} for path, size in sizes.items()]


@contextmanager
def serve():
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def answer(self, content: object = None, status: int = 200, **headers: str) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def do_POST(self):
            path, body = unquote(urlsplit(self.path).path), self.body()
            if "/paths-info/" in path:  # a question, though it is a POST
                _, _, _, org, name, _, revision = path.split("/")
                files, asked = hub.files(f"{org}/{name}", revision), parse_qs(body.decode())["paths"]
                return self.answer(hub.listing({each: files[each] for each in asked if each in files}))
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.answer({"error": "Invalid username or password."}, 401)
            if path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if path == "/api/repos/create":
                request = json.loads(body)
                name = f"{request.get('organization') or hub.user}/{request['name']}"
                url = {"url": f"{hub.url}/{name}", "name": name}
                if name in hub.repos:
                    return self.answer({"error": "You already created this model repo", **url}, 409)
                hub.repos[name], hub.private[name] = {"main": {}}, bool(request.get("private"))
                return self.answer(url)
            if path.endswith("/info/lfs/objects/batch"):
                objects = []
                for each in json.loads(body)["objects"]:
                    actions = {"upload": {"href": f"{hub.url}/objects/{each['oid']}"}}
                    objects.append({**each, **({} if each["oid"] in hub.objects else {"actions": actions})})
                return self.answer({"objects": objects})
            _, _, _, org, name, verb, revision = path.split("/")
            branches = hub.repos[f"{org}/{name}"]
            if verb == "branch":
                if revision in branches:
                    return self.answer({"error": "Reference already exists"}, 409)
                branches[revision] = dict(branches["main"])
                return self.answer({})
            if verb == "preupload":
                paths = [file["path"] for file in json.loads(body)["files"]]
                modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
                answers = [{"path": path, "uploadMode": modes[path], "shouldIgnore": False} for path in paths]
                return self.answer({"files": answers})
            assert verb == "commit", path
            if hub.fail_commits:
                hub.fail_commits -= 1
                self.close_connection = True
                return self.connection.shutdown(socket.SHUT_RDWR)
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    branches[revision][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    branches[revision][line["value"]["path"]] = hub.objects[line["value"]["oid"]]
            oid = hub.sha(branches[revision])
            self.answer({"commitUrl": f"{hub.url}/{org}/{name}/commit/{oid}", "commitOid": oid, "hookOutput": ""})

        def do_PUT(self):
            oid = self.path.rsplit("/", 1)[1]
            hub.objects[oid] = self.body()
            hub.uploads.append(oid)
            self.answer({})

        def do_GET(self):
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[0] == "datasets":  # before the name of a dataset, in the path of a file
                parts = parts[1:]
            if parts[0] == "api" and parts[1] in ("models", "datasets"):
                name, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
                files = hub.files(name, revision)
                if files is None:
                    return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
                if parts[4:5] == ["tree"] and len(parts) == 6:
                    return self.answer(hub.listing(files))
                if parts[4:5] == ["tree"]:  # of a folder, and no repository here has one
                    return self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
                siblings = [{"rfilename": path} for path in files]
                return self.answer(
                    {
                        "id": name,
                        "modelId": name,
                        "sha": hub.sha(files),
                        "siblings": siblings,
                        "tags": [],
                        "private": False,
                    }
                )
            org, name, verb, revision, *rest = parts
            assert verb == "resolve", self.path
            files = hub.files(f"{org}/{name}", revision) or {}
            data = files.get("/".join(rest))
            if data is None:
                return self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            if hub.fail_reads and "Range" in self.headers:
                hub.fail_reads -= 1
                self.close_connection = True
                return self.connection.shutdown(socket.SHUT_RDWR)
            self.answer(data, ETag=f'"{hashlib.sha256(data).hexdigest()}"', X_Repo_Commit=hub.sha(files))

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
