"""Check complete datasets before training on them; see `--help`."""

from cppmega.check_data import main

if __name__ == "__main__":
    main()
