"""The code objects that a rank executes, compared with the files that were checked."""
