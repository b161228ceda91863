"""The bench of guides gives the figures it says it does; how large they are needs a quiet machine."""

from __future__ import annotations

import re

import pytest
from bench.guided import KINDS, MOST, main


def test_each_kind_is_measured_against_plain_answers(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--sequences", "1,2", "--tokens", "8", "--repeat", "1"])
    *lines, last = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r" +(\d) at once  (\w+) +([\d.]+) ms per token +([+-][\d.]+) %", line) for line in lines]
    assert [(one[1], one[2]) for one in found if one] == [(n, kind) for n in "12" for kind in KINDS]
    worst = max(float(one[4]) for one in found if one)
    assert last.startswith(f"guided tokens come at most {worst:.1f} % slower")
    assert status == (worst > 100 * MOST)
