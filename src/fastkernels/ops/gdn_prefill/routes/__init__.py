"""Routes of gdn_prefill, the safe one last."""

from fastkernels.ops.gdn_prefill.routes import torch_chunked

ROUTES = (torch_chunked.ROUTE,)
