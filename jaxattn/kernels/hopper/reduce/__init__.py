"""Reductions over a CTA and a cluster, online softmax, and the RMS-norm prologue."""
