"""Write the README's tables and figure from result files; a test compares them.

usage: python scripts/readme_figures.py [--from runs/quickstart]

With --from, the smoke run's comparison and curves are copied into benchmarks/results first.
"""

import argparse
import shutil
from pathlib import Path

from cppmega.readme import RESULTS, rewritten

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path)
    options = parser.parse_args()
    if options.source:
        shutil.copy(options.source / "comparison.json", RESULTS / "smoke_cpu.json")
        shutil.copy(options.source / "curves.png", RESULTS / "smoke_cpu.png")
    readme = RESULTS.parent.parent / "README.md"
    readme.write_text(rewritten(readme.read_text()))
