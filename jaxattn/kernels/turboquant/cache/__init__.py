"""TurboQuant pages: quantization, append and dequantization."""
