"""Catalogues, which are folders of pages: loading and checking, gates, revisions, and decisions."""
