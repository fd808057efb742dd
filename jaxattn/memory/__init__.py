"""Memory budgets: plan items, device memory and bounds on XLA's temp."""
