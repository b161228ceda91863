"""The first of the README's two commands, in a clean clone: from nothing to an answer. (The second runs this.)"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from tests.e2e.support import clean_env, read_banner, wait_ready

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S = 1500


@pytest.mark.full
def test_make_serve_in_a_clean_clone_answers(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    clone = tmp_path / "tenure"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone)], check=True, timeout=120)
    subprocess.run(["make", "install"], cwd=clone, check=True, timeout=INSTALL_S, env=clean_env(), capture_output=True)
    began = time.monotonic()
    subprocess.run(["make", "install"], cwd=clone, check=True, timeout=60, env=clean_env(), capture_output=True)
    assert time.monotonic() - began < 10, "the second time nothing is left to do"
    installed = subprocess.run(
        [str(clone / ".venv/bin/python"), "-c", "import tenure._native as n; print(n.__file__)"],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "site-packages" in installed.stdout, "the wheel carries the native module"
    process = subprocess.Popen(
        ["make", "-s", "serve", "ARGS=--port 0"],
        cwd=clone, env=clean_env(), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        url = re.search(r"http://[\d.]+:\d+", read_banner(process))
        assert url is not None
        with httpx.Client(base_url=url[0], timeout=60) as http:
            wait_ready(http)
            body = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 16}
            answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
