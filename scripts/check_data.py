"""Read datasets whole before they are trained on; see `--help`."""

from cppmega.check_data import main

if __name__ == "__main__":
    main()
