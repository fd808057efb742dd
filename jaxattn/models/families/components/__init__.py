"""What several families share: attention, experts, configuration fields, quantization."""
