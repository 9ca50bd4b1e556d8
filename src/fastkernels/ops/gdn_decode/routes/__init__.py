"""Routes of gdn_decode, the safe one last."""

from fastkernels.ops.gdn_decode.routes import library, torch_recurrent

ROUTES = (*library.ROUTES, torch_recurrent.ROUTE)
