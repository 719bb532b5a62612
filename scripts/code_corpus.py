"""Make a corpus of C, C++ and Python to train on; see `--help`."""

from cppmega.data.code.command import main

if __name__ == "__main__":
    main()
