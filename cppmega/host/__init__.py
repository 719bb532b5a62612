"""This machine: processes, console, files, packages, and code that is loaded by path and watched."""
