"""Routes of gdn_decode, the safe one last."""

from fastkernels.ops.gdn_decode.routes import torch_recurrent

ROUTES = (torch_recurrent.ROUTE,)
