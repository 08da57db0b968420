"""What one part costs by itself: a linear on the host and over a device, its slices, a transport. Each is a program."""
