"""Record the hashes of what pages make of every supported version: tests/golden/*.json.

    python scripts/record_golden.py [PAGE ...]     # default: every page, and all of them together

Look at `cppmega diff PAGE` before you commit the new hashes: they say that the bytes are meant.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support import laws


def main(names: list[str]) -> None:
    laws.GOLDEN.mkdir(exist_ok=True)
    wanted = names or laws.names()
    for name in [*wanted, laws.TOGETHER]:
        file = laws.GOLDEN / f"{name}.json"
        text = json.dumps(laws.golden(name), indent=1, sort_keys=True) + "\n"
        old = file.read_text() if file.exists() else ""
        if text != old:
            file.write_text(text)
            print(f"{'changed' if old else 'new':<8} {file.name}")
    if not names:
        for file in laws.GOLDEN.glob("*.json"):
            if file.stem not in {*wanted, laws.TOGETHER}:
                file.unlink()
                print(f"{'removed':<8} {file.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
