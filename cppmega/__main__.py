"""`python -m cppmega` is the same as `cppmega`."""

from cppmega.cli import main

if __name__ == "__main__":
    main()
