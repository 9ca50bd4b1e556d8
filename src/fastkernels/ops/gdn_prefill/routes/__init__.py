"""Routes of gdn_prefill, the safe one last."""

from fastkernels.ops.gdn_prefill.routes import library, torch_chunked

ROUTES = (*library.ROUTES, torch_chunked.ROUTE)
