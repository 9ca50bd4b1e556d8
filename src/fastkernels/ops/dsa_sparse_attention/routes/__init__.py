"""Routes of dsa_sparse_attention, the safe one last."""

from fastkernels.ops.dsa_sparse_attention.routes import torch_gather

ROUTES = (torch_gather.ROUTE,)
