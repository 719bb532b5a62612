"""What the benchmarks share: time, trees, tables and result files."""
