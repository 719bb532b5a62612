"""Numbers of residual streams that the fused mHC kernels support; without torch, for rules."""

STREAMS = (1, 2, 4, 8)
