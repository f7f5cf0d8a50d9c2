"""Where K and V live: blocks, who holds them, and the tensors behind them."""
