"""Hugging Face Accelerate: flags of `accelerate launch`, and what each kind of prepared model gets. See autohook.register."""
