"""One transport inside every host, another one between hosts."""
