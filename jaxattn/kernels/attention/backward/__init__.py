"""The backward pass of causal attention: one kernel computes dq, dk and dv."""
