"""Code that the text patched by a single page imports, in a module named after the page."""
