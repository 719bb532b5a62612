"""`python -m cppmega.apply_patches`: the command to run after every Megatron upgrade."""

import sys

from cppmega.host import python

if __name__ == "__main__":
    python.working_directory_last()
    from cppmega.cli.main import main

    main(["apply", *sys.argv[1:]])
