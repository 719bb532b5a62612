"""Write upstream_patches/README.md from the catalogue; a test compares the two."""

from cppmega.authoring.catalogue_readme import readme
from cppmega.catalogue.loader import builtin_folder

if __name__ == "__main__":
    (builtin_folder() / "README.md").write_text(readme())
