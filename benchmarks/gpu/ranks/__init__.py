"""What runs as ranks that share the GPU, and how a part starts them."""
