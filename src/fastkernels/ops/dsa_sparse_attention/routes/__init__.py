"""Routes of dsa_sparse_attention, the safe one last."""

from fastkernels.ops.dsa_sparse_attention.routes import library, torch_gather

ROUTES = (*library.ROUTES, torch_gather.ROUTE)
