"""Memory that is used again and again: pooled buffers, and the block that a window is cut from."""
