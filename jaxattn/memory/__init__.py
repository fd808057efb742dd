"""Memory budgets: plan items, engine limits, device memory and bounds on XLA's temp."""
