"""Routes of dsa_topk_indexer, the safe one last."""

from fastkernels.ops.dsa_topk_indexer.routes import torch_tiled

ROUTES = (torch_tiled.ROUTE,)
