"""Turn text, JSONL or source trees into a Megatron dataset; see `--help`."""

from cppmega.data.command import main

if __name__ == "__main__":
    main()
