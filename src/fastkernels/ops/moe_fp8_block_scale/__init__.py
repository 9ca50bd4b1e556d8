"""moe_fp8_block_scale: grouped top-k routing and two block-scaled FP8 GEMMs per local expert."""
