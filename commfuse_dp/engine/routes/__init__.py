"""How partial gradients reach owners to whom they do not go straight: chains, and through hosts; on a host and in streams."""
