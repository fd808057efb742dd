"""What a model keeps between steps: pages, recurrent states, symmetric memory."""
