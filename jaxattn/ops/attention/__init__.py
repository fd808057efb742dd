"""What the causal attentions of tokens to themselves share: packed sequences and gradients."""
