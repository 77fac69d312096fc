"""A hub id is fetched through huggingface_hub from whatever HF_ENDPOINT names."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlparse

import pytest

GOLDEN = Path(__file__).parent.parent / "golden" / "models" / "mistral_g8_h64_window"
ROOT = Path(__file__).parent.parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_" + "x" * 34


class Mirror(http.server.BaseHTTPRequestHandler):
    """Just enough of a hub: one repository, one revision, readable with one token."""

    files: dict[str, bytes]
    asked: list[str]

    def log_message(self, format, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urlparse(self.path).path
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if path == "/api/models/tiny/mistral/revision/v1":
            siblings = [{"rfilename": name} for name in self.files]
            return self.answer_json({"id": "tiny/mistral", "sha": COMMIT, "siblings": siblings})
        if path.startswith("/api/models/tiny/mistral/tree/"):
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": digest(data)}
                for name, data in self.files.items()
            ]
            return self.answer_json(rows)
        if path.startswith("/api/models/tiny/mistral/revision/"):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        name = path.removeprefix(f"/tiny/mistral/resolve/{COMMIT}/")
        if name in self.files:
            self.asked.append(name)
            data = self.files[name]
            return self.answer(200, data, {"ETag": f'"{digest(data)}"', "X-Repo-Commit": COMMIT})
        return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status, data, headers):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def digest(data):
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def mirror():
    files = {path.name: path.read_bytes() for path in GOLDEN.iterdir()}
    unwanted = {
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"twice",
        "original/model.safetensors": b"other",
        "evil.py": b"raise SystemExit",
    }
    handler = type("Handler", (Mirror,), {"files": files | unwanted, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server, handler
    server.shutdown()
    thread.join()
    server.server_close()


_PROGRAM = """
import sys
from rjax import models
try:
    loaded = models.load_model(
        "tiny/mistral", dtype=None, revision=sys.argv[1], token=sys.argv[2], progress=False
    )
    print(loaded.config.architecture, loaded.folder)
except models.CheckpointError as error:
    print(error)
"""


def fetch(server, home, revision, token):
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "no_proxy": "127.0.0.1",
    }
    environment.pop("HF_HUB_OFFLINE", None)
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, revision, token],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


@pytest.mark.thorough
def test_fetches_what_is_needed_from_a_mirror(mirror, tmp_path):
    server, handler = mirror
    said = fetch(server, tmp_path, "v1", TOKEN)
    assert said.startswith(f"MistralForCausalLM {tmp_path}")
    assert COMMIT in said
    assert set(handler.asked) == {path.name for path in GOLDEN.iterdir()}
    assert fetch(server, tmp_path, "v2", TOKEN).endswith("it has no revision 'v2'")
    assert "repository on the hub that you can read" in fetch(
        server, tmp_path / "new", "v1", "hf_wrong"
    )
