"""Memory budgets: plan lines, limits, devices and bounds."""
