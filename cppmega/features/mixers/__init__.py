"""Mixers of a hybrid model: Mamba-3 and M2RNN."""
