"""A stand-in for the Hugging Face hub on 127.0.0.1: data sets from a dictionary, a log of requests, and outages."""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DATE = "2025-01-01T00:00:00.000Z"


@dataclass
class StandInHub:
    """Serves one data set. Use it as a context manager; `url` is its address."""

    dataset: str
    files: Mapping[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    fail_with: list[int] = field(default_factory=list)
    """Status codes for the requests that come next, one each."""
    down_with: int | None = None
    """Status code for every request, as long as it is set."""
    cut_after: int | None = None
    """Break the connection of the next download after so many bytes."""
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, range) of each request."""

    def __enter__(self) -> "StandInHub":
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def opened(self) -> list[str]:
        """The data files that were read from, in order, each as often as it was."""
        found = [re.search(r"/resolve/[^/]+/(.+)", path) for method, path, _ in self.log if method == "GET"]
        return [unquote(match[1]) for match in found if match and match[1] != "README.md"]

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        path = unquote(urlsplit(request.path).path)
        self.log.append((request.command, path, request.headers.get("range")))
        status = self.fail_with.pop(0) if self.fail_with else self.down_with
        if status:
            self._send(request, status, b"later", {"retry-after": "0"} if status == 429 else {})
        elif path.startswith(f"/datasets/{self.dataset}/resolve/"):
            self._send_file(request, path.split("/", 6)[6])
        elif path.startswith(f"/api/datasets/{self.dataset}"):
            self._send_json(request, path, parse_qs(body.decode()), body)
        else:
            self._send(request, 404, b"", {"x-error-code": "RepoNotFound"})

    def _send_json(self, request: BaseHTTPRequestHandler, path: str, form: dict, body: bytes) -> None:
        rest = path.removeprefix(f"/api/datasets/{self.dataset}").strip("/")
        kind, _, rest = rest.partition("/")
        if kind in ("", "revision"):
            siblings = [{"rfilename": name} for name in self.files]
            about = {"_id": "0", "id": self.dataset, "sha": self.commit, "siblings": siblings, "private": False,
                     "gated": "auto" if self.gated else False, "disabled": False, "tags": [], "downloads": 0,
                     "likes": 0, "lastModified": DATE, "createdAt": DATE}  # fmt: skip
            self._send(request, 200, json.dumps(about).encode())
        elif kind == "tree":
            folder = rest.partition("/")[2]
            self._send(request, 200, json.dumps(self._entries(folder)).encode())
        elif kind == "paths-info":
            names = form.get("paths") or json.loads(body).get("paths", [])
            found = [entry for name in names for entry in self._entries("") if entry["path"] == name]
            self._send(request, 200, json.dumps(found).encode())
        else:
            self._send(request, 404, b"")

    def _entries(self, folder: str) -> list[dict]:
        names = [name for name in self.files if not folder or name.startswith(f"{folder}/")]
        if folder and not names:
            return []
        folders = {"/".join(name.split("/")[:n]) for name in names for n in range(1, name.count("/") + 1)}
        entries = [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": name} for name in sorted(folders - {folder})
        ]
        return entries + [
            {
                "type": "file",
                "oid": hashlib.sha1(self.files[name]).hexdigest(),
                "size": len(self.files[name]),
                "path": name,
            }
            for name in names
        ]

    def _send_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        if self.gated:
            self._send(request, 403, b"", {"x-error-code": "GatedRepo", "x-error-message": "Access is restricted"})
            return
        if name not in self.files:
            self._send(request, 404, b"", {"x-error-code": "EntryNotFound", "x-repo-commit": self.commit})
            return
        content, status, headers = self.files[name], 200, {}
        headers = {
            "etag": f'"{hashlib.sha1(content).hexdigest()}"',
            "x-repo-commit": self.commit,
            "accept-ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range") or "")
        if wanted:
            start, end = int(wanted[1]), min(int(wanted[2] or len(content) - 1), len(content) - 1)
            headers["content-range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        self._send(request, status, content, headers)

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, content: bytes, headers: Mapping[str, str] = {}
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("content-length", str(len(content)))
        request.end_headers()
        if request.command == "HEAD":
            return
        if self.cut_after is not None and "content-range" in headers:
            content, self.cut_after = content[: self.cut_after], None
            request.close_connection = True
        request.wfile.write(content)
