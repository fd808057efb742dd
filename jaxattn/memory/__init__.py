"""What the planner stands on: lines of a plan, limits, devices, bounds."""
