"""Train a recipe; see `python scripts/train.py --help`."""

from cppmega.trainer import main

if __name__ == "__main__":
    main()
