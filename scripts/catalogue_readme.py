"""Write upstream_patches/README.md from the catalogue; a test compares the two."""

from cppmega.catalogue import builtin_folder
from cppmega.catalogue_table import readme

if __name__ == "__main__":
    (builtin_folder() / "README.md").write_text(readme())
