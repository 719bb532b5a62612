"""Measurements, and the results that they wrote: `python -m benchmarks.NAME --help` in a checkout.

    harness         what all of them share: time, trees, training runs, tables and result files
    slices          runs that train one slice of a model, or a small one
    whole           runs that train a whole recipe
    upstream_tests  Megatron's own unit tests, on stock and on patched code

A page in `results` calls a script by the name that it had when the page was written:
`whole_rows.py` is `whole/rows.py`, and `slice_turns.py` is `slices/turns.py`. What is gone, such as
`mhc_upstream.py` or `dsa_attention sharing`, measured once; commit 36c1311 has it.
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
