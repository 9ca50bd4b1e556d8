"""gdn_prefill: the gated delta rule over whole sequences of different lengths."""
