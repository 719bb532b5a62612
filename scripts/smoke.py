"""Train a small GPT with MTP on CPU; see `python scripts/smoke.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.smoke.command import cli

if __name__ == "__main__":
    cli()
