"""gdn_decode: one gated-delta-rule step per sequence."""
