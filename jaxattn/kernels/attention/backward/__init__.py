"""The backward pass of causal attention: one kernel gives dq, dk and dv."""
