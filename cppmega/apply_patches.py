"""`python -m cppmega.apply_patches`: the command to run after every Megatron upgrade."""

import sys

from cppmega.cli import main

if __name__ == "__main__":
    main(["apply", *sys.argv[1:]])
