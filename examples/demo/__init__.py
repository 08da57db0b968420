"""`commfuse demo`: stock FSDP2 and CommFuse, side by side."""
