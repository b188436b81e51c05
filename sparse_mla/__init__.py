"""FP8 sparse MLA attention for DeepSeek sparse attention models."""
