"""Run folders: listed, watched, compared, stopped."""
