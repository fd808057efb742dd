"""Parts of all causal attentions of tokens to themselves: packed sequences and gradients."""
