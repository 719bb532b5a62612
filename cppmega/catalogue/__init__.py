"""Catalogues: folders of pages, loaded and checked, their gates, and what their revisions cover."""
