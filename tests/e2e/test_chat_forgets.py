"""`tenure chat` in a small context: it goes on talking, and says what the model can no longer see."""

from __future__ import annotations

import subprocess

from tests.e2e.support import COMMAND, clean_env


def test_a_long_talk_is_trimmed_and_told() -> None:
    lines = [f"Tell me about number {number}: " + "and so on and on, " * 24 for number in range(6)]
    flags = ("--max-model-len", "1024", "--max-tokens", "60")
    result = subprocess.run(
        [*COMMAND, "chat", *flags],
        input="\n".join([*lines, "/history", "/quit"]),
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_env(),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "The model can no longer see your" in result.stdout
    assert "its context of 1024 tokens. /history shows it." in result.stdout
    history = result.stdout[result.stdout.rindex("\n✗ the model") - 4000 :]
    shown = [line for line in result.stdout.splitlines() if "Tell me about number" in line]
    assert shown[0].startswith("✗"), history
    assert shown[-1].startswith(" "), history
