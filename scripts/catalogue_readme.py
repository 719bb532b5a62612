"""Write README.md and NOT.md of upstream_patches; a test compares them with the catalogue."""

from cppmega.authoring.catalogue_readme import readme
from cppmega.authoring.decisions_page import page
from cppmega.catalogue.loader import builtin_folder

if __name__ == "__main__":
    (builtin_folder() / "README.md").write_text(readme())
    (builtin_folder() / "NOT.md").write_text(page())
