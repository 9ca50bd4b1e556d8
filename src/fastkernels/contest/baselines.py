"""Calls of FlashInfer as solutions: what the contest's score divides by, where its own baseline is
not at hand. The public data set's solutions (`flashinfer_wrapper_*`) are not part of this package;
`fastkernels pack --baseline` takes one.
"""

from __future__ import annotations

from typing import Any

NAME = "flashinfer_baseline"

_TEXTS = {
    # FlashInfer updates a state where it lies; the definition wants another one.
    "gdn_decode": """\
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as decode


def run(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state):
    new_state.copy_(state)
    decode(
        q=q, k=k, v=v, state=new_state, A_log=A_log, a=a, dt_bias=dt_bias, b=b, scale=scale,
        output=output, use_qk_l2norm=False,
    )
""",
    "gdn_prefill": """\
from flashinfer.gdn_prefill import chunk_gated_delta_rule as prefill


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale, output, new_state):
    prefill(
        q=q, k=k, v=v, g=a, beta=b, scale=scale, initial_state=state, output_final_state=True,
        cu_seqlens=cu_seqlens, output=output, output_state=new_state, use_gate_in_kernel=True,
        beta_is_logit=True, A_log=A_log, dt_bias=dt_bias,
    )
""",
}


def baseline(op: str, definition: str) -> dict[str, Any] | None:
    """FlashInfer as a solution of a definition; None where no call of it is known here."""
    if op not in _TEXTS:
        return None
    return {
        "name": NAME,
        "definition": definition,
        "author": "flashinfer",
        "spec": {
            "language": "python",
            "target_hardware": ["cuda"],
            "entry_point": "main.py::run",
            "dependencies": ["flashinfer"],
            "destination_passing_style": True,
        },
        "sources": [{"path": "main.py", "content": _TEXTS[op]}],
    }
