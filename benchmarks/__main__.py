"""`python -m benchmarks <name> [--seeds N] [--json FILE]`: run a benchmark and print its table.

Names are the modules beside this one: `bits`, `allocation`, `search-cost`, `engine`, `winq`, `winq-sweep`, `hessian`,
`salient`, `decode`, `scale`. FILE receives {"meta": ..., "rows": [...]}.
"""

import argparse
import importlib
import json
import logging
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tabulate import tabulate

from tasks.errors import UserError

NAMES = ("bits", "allocation", "search-cost", "engine", "winq", "winq-sweep", "hessian", "salient", "decode", "scale")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds of what is random (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same numbers to FILE")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds} is not at least 1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("windquant").setLevel(logging.INFO)  # progress, on stderr: the table is stdout's
    try:
        rows, notes = importlib.import_module(f"benchmarks.{arguments.name.replace('-', '_')}").run(arguments.seeds)
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".4f"))
    print("\n".join(["", *notes]))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"meta": _meta(argv), "rows": rows}, indent=2) + "\n")
    return 0


def _meta(argv: list[str]) -> dict[str, Any]:
    head = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {
        "commit": head.stdout.strip(),
        "command": " ".join(["python -m benchmarks", *argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
