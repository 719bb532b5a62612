"""Make a corpus of C, C++ and Python to train on; see `--help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.code_corpus.command import main

if __name__ == "__main__":
    main()
