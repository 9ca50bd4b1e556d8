"""dsa_sparse_attention: latent attention over the cache rows that an indexer chose."""
