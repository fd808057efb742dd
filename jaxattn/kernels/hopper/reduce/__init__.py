"""Reductions over a block and a cluster, online softmax, and the RMS-norm prologue."""
