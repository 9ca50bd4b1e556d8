"""Fast operators of DeepSeek-V3.2 and Qwen3-Next for PyTorch inference."""

__version__ = "0.1.0"
