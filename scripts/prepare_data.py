"""Turn text, JSONL or source trees into a Megatron dataset; see `--help`."""

from cppmega.prepare import main

if __name__ == "__main__":
    main()
