"""A Hub on the loopback, in a process of its own: the routes and headers that its client asks for.

`serve(root)` starts it. Below `root` lie `models/ORG/NAME/COMMIT` and `datasets/…` with files, and
beside them branches: files with a commit, or with one for each request, the last for all later.
`answers.json` has errors by repository and kind of request (api, file), or by the name of a file
(no hub: files without the Hub's headers);
`cuts.json` has the bytes after which a file is cut off, one for each time. `log.txt` has a line for
each request.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?")
NONE: Mapping[str, str] = {}
RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Handler(BaseHTTPRequestHandler):
    """Answers as the Hub does, from the files of `root`."""

    root: Path
    times: ClassVar[Counter] = Counter()  # of requests for a branch, or a file
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = unquote(urlsplit(self.path).path)
        told = f"{self.command} {url} {self.headers.get('Range', '')}".strip()
        with (self.root / "log.txt").open("a") as log:
            log.write(f"{told}\n")
        if match := API.fullmatch(url):
            self.about(*match.groups())
        elif match := RESOLVE.fullmatch(url):
            self.file("datasets" if match[1] else "models", *match.groups()[1:])
        else:
            self.fails(404)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass

    def refused(self, repo: str, what: str) -> bool:
        """Answer with the error that a repository has for a kind of request, if it has one."""
        answers = json.loads((self.root / "answers.json").read_text())
        if (answer := answers.get(repo, {}).get(what)) is None:
            return False
        self.fails(*answer)
        return True

    def commit_of(self, kind: str, repo: str, revision: str) -> str | None:
        folder = self.root / kind / repo
        if not folder.is_dir():
            self.fails(401, "RepoNotFound")
        elif (folder / revision).is_dir():
            return revision
        elif (folder / revision).is_file():
            commits = (folder / revision).read_text().split()
            self.times[repo] += len(commits) > 1
            return commits[min(max(self.times[repo], 1), len(commits)) - 1]
        else:
            self.fails(404, "RevisionNotFound")
        return None

    def about(self, kind: str, repo: str, what: str | None, revision: str | None) -> None:
        if self.refused(repo, "api"):
            return
        commit = self.commit_of(kind, repo, revision or "main")
        if commit is None:
            return
        if what != "tree":
            self.sends(json.dumps({"id": repo, "sha": commit}).encode())
            return
        folder = self.root / kind / repo / commit
        files = [
            {
                **{"type": "file", "path": path.relative_to(folder).as_posix()},
                **{"size": path.stat().st_size, "oid": etag_of(path)},
            }
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        self.sends(json.dumps(files).encode())

    def file(self, kind: str, repo: str, revision: str, name: str) -> None:
        if self.refused(repo, "file") or (self.command == "GET" and self.refused(repo, name)):
            return
        commit = self.commit_of(kind, repo, revision)
        if commit is None:
            return
        path = self.root / kind / repo / commit / name
        if not path.is_file():
            self.fails(404, "EntryNotFound")
            return
        answers = json.loads((self.root / "answers.json").read_text())
        if answers.get(repo, {}).get("no hub"):
            self.sends(path.read_bytes())
            return
        data, first = path.read_bytes(), 0
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag_of(path)}"', "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            first = int(match[1])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        cuts = json.loads((self.root / "cuts.json").read_text()).get(name, [])
        cut = 0
        if self.command == "GET" and self.times[name] < len(cuts):
            cut = cuts[self.times[name]]
            self.times[name] += 1
        self.sends(data[first:], headers, 206 if first else 200, cut)

    def fails(self, status: int, code: str = "", words: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": words}
        self.sends(b"", {name: value for name, value in headers.items() if value}, status)

    def sends(
        self, data: bytes, headers: Mapping[str, str] = NONE, status: int = 200, cut: int = 0
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut] if cut else data)
        if cut:
            self.close_connection = True


def etag_of(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def main(root: Path) -> None:
    Handler.root = root
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


@contextmanager
def serve(root: Path) -> Iterator[str]:
    """Yield the address of a server of these files, in a process of its own."""
    root.mkdir(parents=True, exist_ok=True)
    for name in ("answers.json", "cuts.json"):
        if not (root / name).exists():
            (root / name).write_text("{}")
    (root / "log.txt").touch()
    process = subprocess.Popen(
        [sys.executable, __file__, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


def requests(root: Path) -> list[str]:
    """Return the requests so far, and forget them."""
    lines = (root / "log.txt").read_text().splitlines()
    (root / "log.txt").write_text("")
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1]))
