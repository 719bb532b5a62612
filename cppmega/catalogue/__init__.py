"""Catalogues, which are folders of pages: loading and checking, gates, and revisions."""
