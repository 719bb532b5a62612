"""Imported by the server of the tests: its forks know the code of the pages, but not the pages.

Most forks load all pages, and each would parse and compile them again.
"""

from __future__ import annotations

import os
import pickle

from cppmega.rewriting import code_text

reader, writer = os.pipe()
if not (child := os.fork()):
    from cppmega.catalogue import loader

    loader.load()
    with os.fdopen(writer, "wb") as file:
        pickle.dump(code_text.known(), file)
    os._exit(0)
os.close(writer)
with os.fdopen(reader, "rb") as file:
    facts = pickle.load(file)
os.waitpid(child, 0)
code_text.remember(facts)
