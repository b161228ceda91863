"""What the README and the banner tell a newcomer to paste works against a real server."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.support import Running

ROOT = Path(__file__).resolve().parents[2]
WRITTEN_URL = "http://127.0.0.1:8000"


def test_the_python_example_prints_an_answer_and_a_receipt(server: Running) -> None:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    assert WRITTEN_URL in found[1]
    program = found[1].replace(WRITTEN_URL, server.url)
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    answer, receipt = out.strip().rsplit("\n", 1)
    assert answer
    assert "'prompt_tokens'" in receipt


def test_the_curl_of_the_banner_answers(server: Running) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here to paste the command into")
    command = server.printed[server.printed.index("curl ") :]
    words = shlex.split(command.replace("\\\n", " "))
    out = subprocess.run([*words, "-s"], capture_output=True, text=True, check=True, timeout=120).stdout
    assert '"kv":' in out
