"""The indexer of DeepSeek Sparse Attention: scores of all tokens, and their exact top k."""
