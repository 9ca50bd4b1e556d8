"""Routes of moe_fp8_block_scale, the safe one last."""

from fastkernels.ops.moe_fp8_block_scale.routes import library, torch_grouped

ROUTES = (*library.ROUTES, torch_grouped.ROUTE)
