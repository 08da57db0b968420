"""What stream-ordered transports have in common, over mapped memory or over grouped exchanges."""
