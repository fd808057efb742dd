"""A decoder of blocks: its specification, layer segments, layer scan and decode step."""
