"""DeepSeek Sparse Attention: the indexer's cache and top-k, and MLA over chosen tokens."""
