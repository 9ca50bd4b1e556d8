"""Routes of dsa_topk_indexer, the safe one last."""

from fastkernels.ops.dsa_topk_indexer.routes import library, torch_tiled

ROUTES = (*library.ROUTES, torch_tiled.ROUTE)
