"""GPUs of one host: copies ordered by streams and words."""
