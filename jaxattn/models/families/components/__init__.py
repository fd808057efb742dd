"""Components of several families: attention, experts, config fields and quantization."""
