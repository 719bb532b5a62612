"""Write the generated pages about the catalogue; a test compares them with it."""

from cppmega.authoring import exports_page
from cppmega.authoring.catalogue_readme import readme
from cppmega.authoring.decisions_page import page
from cppmega.catalogue.loader import builtin_folder

if __name__ == "__main__":
    (builtin_folder() / "README.md").write_text(readme())
    (builtin_folder() / "NOT.md").write_text(page())
    (builtin_folder().parent / "docs" / "upstream.md").write_text(exports_page.page())
