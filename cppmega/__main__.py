"""`python -m cppmega` is the same as `cppmega`."""

from cppmega.host import python

if __name__ == "__main__":
    python.working_directory_last()
    from cppmega.cli.main import main

    main()
