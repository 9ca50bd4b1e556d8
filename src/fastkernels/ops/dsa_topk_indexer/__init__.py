"""dsa_topk_indexer: scores of a lightning indexer over a paged FP8 key cache, and their top-k."""
