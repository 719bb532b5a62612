"""This machine: processes, console, files, packages, and code loaded by path under watch."""
