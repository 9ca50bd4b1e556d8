"""Routes of moe_fp8_block_scale, the safe one last."""

from fastkernels.ops.moe_fp8_block_scale.routes import torch_grouped

ROUTES = (torch_grouped.ROUTE,)
