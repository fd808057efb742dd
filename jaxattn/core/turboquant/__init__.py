"""The TurboQuant codec: formats, slot layout and reads."""
