"""What one process shares: its state, pauses of the garbage collector, and guards."""
