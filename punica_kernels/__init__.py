"""Segmented LoRA products over a rank arena; knows nothing of serving."""
