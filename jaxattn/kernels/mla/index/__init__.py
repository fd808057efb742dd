"""The indexer of DeepSeek Sparse Attention: scores of all tokens, and the exact top k of them."""
