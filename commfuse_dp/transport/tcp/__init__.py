"""Between hosts: plain TCP with one I/O thread a rank."""
