"""Host time of the engine per step."""
