"""What the one-sided transports share: publish once, pull at will; messages into inbox rings."""
