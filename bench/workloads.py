"""Write the workloads' token ids as a file: ``python -m bench.workloads OUT.json [SEED]``.

A run takes them from ``../shared/bench/workloads.json`` when that is there and otherwise makes these in memory; the
file is for looking at them, or for giving the same prompts to something else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tenure.cli.bench_client import generated

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(generated(int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
