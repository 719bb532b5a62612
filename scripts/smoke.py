"""Train a small GPT with MTP on CPU; see `python scripts/smoke.py --help`."""

from cppmega.smoke.command import cli

if __name__ == "__main__":
    cli()
